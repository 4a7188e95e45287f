"""Block kinds: how weights lie in files, their sizes, and exact conversion from and to float32.

A kind packs `block_elements` consecutive elements of a row into `block_bytes`. This module checks
names and sizes; the arithmetic of each kind is in `block_decoders` and `block_encoders`. It is
the meaning of stored weights, not a fast path: backends repack the bytes themselves.
If you add a kind: KINDS here, a decoder, an encoder, a golden (tests/formats/make_goldens.py).
Source: ggml (`ggml-common.h`, type ids of `ggml.h`); OCP Microscaling 1.0 for MXFP4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.formats.block_decoders import DECODERS
from headrace.formats.block_encoders import ENCODERS

# Elements decoded at once: temporaries (a few times 4 bytes each) stay in a 2 MB L2 cache.
CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class BlockKind:
    """`type_id` is ggml's tensor type number."""

    name: str
    type_id: int
    block_elements: int
    block_bytes: int


KINDS: Mapping[str, BlockKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockKind("F32", 0, 1, 4),
            BlockKind("F16", 1, 1, 2),
            BlockKind("Q4_0", 2, 32, 18),
            BlockKind("Q4_1", 3, 32, 20),
            BlockKind("Q5_0", 6, 32, 22),
            BlockKind("Q5_1", 7, 32, 24),
            BlockKind("Q8_0", 8, 32, 34),
            BlockKind("Q2_K", 10, 256, 84),
            BlockKind("Q3_K", 11, 256, 110),
            BlockKind("Q4_K", 12, 256, 144),
            BlockKind("Q5_K", 13, 256, 176),
            BlockKind("Q6_K", 14, 256, 210),
            BlockKind("IQ4_NL", 20, 32, 18),
            BlockKind("IQ4_XS", 23, 256, 136),
            BlockKind("BF16", 30, 1, 2),
            BlockKind("MXFP4", 39, 32, 17),
        )
    }
)


def block_kind(name: str) -> BlockKind:
    """The kind called `name`. **Raises** `FormatError` that lists the known kinds."""
    kind = KINDS.get(name)
    if kind is None:
        raise FormatError(f"{name!r} is not a known block kind; known: {', '.join(KINDS)}")
    return kind


def num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. **Raises** `FormatError` when a row does not divide into blocks."""
    block = block_kind(kind)
    row = shape[-1] if shape else 1
    if any(size < 0 for size in shape):
        raise FormatError(f"shape {shape} has a negative size")
    if row % block.block_elements:
        raise FormatError(
            f"rows of {row} elements do not divide into {kind} blocks of {block.block_elements}"
        )
    return math.prod(shape) // block.block_elements * block.block_bytes


def decode(kind: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The float32 values of stored bytes; a fresh writable array.

    **Raises** `FormatError` when `data` is not `num_bytes(kind, shape)` long. Scales that are not
    finite are carried into the values, as stored.
    """
    block = block_kind(kind)
    expected = num_bytes(kind, shape)
    if data.dtype != np.uint8 or data.size != expected:
        raise FormatError(
            f"a {kind} tensor of shape {shape} has {expected} bytes, got {data.size} "
            f"of type {data.dtype}"
        )
    raw = data.reshape(-1, block.block_bytes)
    out = np.empty((len(raw), block.block_elements), np.float32)
    step = max(1, CHUNK_ELEMENTS // block.block_elements)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(raw), step):
            chunk = DECODERS[kind](raw[start : start + step])
            out[start : start + step] = chunk.reshape(-1, block.block_elements)
    return out.reshape(shape)


def encode(kind: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Stored bytes of float32 values [..., row], flat; blocks run along the last axis.

    **Raises** `FormatError` when rows do not divide into blocks, or when a quantised kind is
    given values that are not finite.
    """
    block = block_kind(kind)
    size = num_bytes(kind, x.shape)
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, block.block_elements)
    if block.block_elements > 1 and not np.isfinite(rows).all():
        raise FormatError(f"{kind} cannot hold values that are not finite")
    out = np.empty((len(rows), block.block_bytes), np.uint8)
    step = max(1, CHUNK_ELEMENTS // block.block_elements)
    with np.errstate(over="ignore"):
        for start in range(0, len(rows), step):
            out[start : start + step] = ENCODERS[kind](rows[start : start + step])
    assert out.size == size
    return out.reshape(-1)
