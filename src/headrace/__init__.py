"""headrace: a model file in, a production endpoint out.

The Python API is `LLM`, `AsyncEngine`, `SamplingParams`, `Message` and `Completion`; each name is
imported when first used, so that `import headrace` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.llm import LLM, AsyncEngine
    from headrace.types import Completion, Message, SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncEngine", "Completion", "Message", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "headrace.llm",
    "AsyncEngine": "headrace.llm",
    "Completion": "headrace.types",
    "Message": "headrace.types",
    "SamplingParams": "headrace.types",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
