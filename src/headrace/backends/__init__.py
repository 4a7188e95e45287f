"""The compute layer: one protocol (`ops`), several backends, picked by name.

`reference` (numpy) is the meaning of every op; `cpu` (C++) is the fast one. A backend is imported
only when it is asked for, so that neither a compiler nor a GPU library is needed by the others.
"""

from __future__ import annotations

from headrace.backends.ops import Ops
from headrace.errors import InvalidRequest

NAMES = ("cpu", "reference")


def select(name: str, num_threads: int = 0) -> Ops:
    """The backend called `name`; `num_threads` 0 means one per core (`reference` ignores it).

    **Raises** `InvalidRequest` for a name that is not in `NAMES`.
    """
    if name == "cpu":
        from headrace.backends.cpu import CpuOps  # needs the compiled module

        return CpuOps(num_threads)
    if name == "reference":
        from headrace.backends.reference import ReferenceOps

        return ReferenceOps()
    raise InvalidRequest(
        f"backend {name!r} is not known; choose one of: {', '.join(NAMES)}", param="backend"
    )
