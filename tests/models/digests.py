"""Reads tests/models/goldens and says how far a model is from them.

What is stored, and how it was made, is in `make_goldens.py`. Errors are relative to the largest
logit of the row, so that a vocabulary of tiny logits is not judged by noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import running
import tiny_models
from numpy.typing import NDArray

from headrace.backends.ops import Ops
from headrace.backends.reference import ReferenceOps
from headrace.models import Model, load_model
from headrace.types import Checkpoint

GOLDENS = Path(__file__).parent / "goldens"
STRIDE = 97  # as in make_goldens.py


@dataclass(frozen=True)
class Digest:
    """What transformers answered to one prompt. **Shapes** see `make_goldens.digest`."""

    tokens: NDArray[np.int32]
    rows: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    logsumexp: NDArray[np.float64]
    max_abs: NDArray[np.float32]
    strided: NDArray[np.float32]


def load(name: str) -> list[Digest]:
    """The prompts of a real model, shortest first."""
    with np.load(GOLDENS / f"{name.replace(':', '-')}.npz") as arrays:
        count = len({key.split(".")[0] for key in arrays})
        fields = Digest.__dataclass_fields__
        return [Digest(**{f: arrays[f"{i}.{f}"] for f in fields}) for i in range(count)]


def tiny_error(checkpoint: Checkpoint, case: str) -> float:
    """Largest relative error over the prompts of a tiny case."""
    ops = ReferenceOps(batch_invariant=False)
    model = load_model(checkpoint, ops, max_context=tiny_models.MAX_CONTEXT.get(case))
    with np.load(GOLDENS / "tiny.npz") as arrays:
        return max(
            running.relative_error(running.logits_of(model, tokens, ops=ops), arrays[f"{case}.{i}"])
            for i, tokens in enumerate(tiny_models.prompts(case))
        )


def real_error(model: Model, digest: Digest, ops: Ops) -> float:
    """Largest error of the stored logits and logsumexps, relative to their row's largest logit."""
    logits = running.logits_of(model, digest.tokens, digest.rows.tolist(), ops)
    ours = np.take_along_axis(logits, digest.top_ids, axis=-1).astype(np.float64)
    top = np.abs(ours - digest.top_logits).max(axis=-1)
    total = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
    errors = np.maximum(top, np.abs(total - digest.logsumexp))
    last = np.abs(logits[-1, ::STRIDE].astype(np.float64) - digest.strided).max()
    errors[-1] = max(errors[-1], last)
    return float((errors / digest.max_abs).max())
