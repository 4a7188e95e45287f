"""Model files: bytes on disk to `Checkpoint` values; nothing here computes with weights.

`open_checkpoint` is the door; `gguf` and `safetensors` read the two containers, `blocks` knows how
quantised weights lie. Every file is hostile until checked: whatever is wrong with one ends in a
`FormatError`. Metadata values are typed but not judged: `models.keys` and `text` do that.
The door is loaded on first use: it needs numpy, which the catalogue and the store do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.formats.checkpoint import open_checkpoint

__all__ = ["open_checkpoint"]


def __getattr__(name: str) -> Any:
    if name != "open_checkpoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headrace.formats.checkpoint import open_checkpoint

    return open_checkpoint
