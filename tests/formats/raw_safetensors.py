"""Builds safetensors bytes by hand, right or wrong; the layout is that of the format's README."""

from __future__ import annotations

import json
from typing import Any


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def build(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    """`header` is an object to dump, or the bytes of the header; `size` is a false length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if size is None else size).to_bytes(8, "little") + raw + data


GOOD_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": entry("F32", [2, 2], 0, 16),
    "b": entry("BF16", [4], 16, 24),
    "c": entry("F16", [2], 24, 28),
}
GOOD = build(GOOD_HEADER, bytes(range(28)))
