"""Inputs that the tests of the native backend share: blocks with chosen bytes, matrices, ISAs.

Random blocks come in two sorts: `encoded` (what a converter writes) and `raw` (any bytes with
finite scales: bit patterns that no converter writes). Field offsets: the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.formats import blocks
from headrace.types import StoredTensor

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]

ISAS = _native.available_isas()

KINDS = tuple(blocks.KINDS)
FLOAT_KINDS = tuple(kind for kind in KINDS if blocks.KINDS[kind].block_elements == 1)
QUANT_KINDS = tuple(kind for kind in KINDS if kind not in FLOAT_KINDS)

# Byte offsets of the halves of a block that scale it.
HALVES: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}

# What makes every scale 1 and every minimum 0: (first byte, bytes).
ONE = bytes(np.array([1.0], "<f2").view(np.uint8))
SIX_BIT_ONES = bytes([1] * 4 + [0] * 4 + [1] * 4)
UNIT_FIELDS: Mapping[str, tuple[tuple[int, bytes], ...]] = {
    "Q4_0": ((0, ONE),),
    "Q4_1": ((0, ONE), (2, bytes(2))),
    "Q5_0": ((0, ONE),),
    "Q5_1": ((0, ONE), (2, bytes(2))),
    "Q8_0": ((0, ONE),),
    "Q2_K": ((0, bytes([1] * 16)), (80, ONE), (82, ONE)),
    "Q3_K": ((96, bytes([0x11] * 8 + [0xAA] * 4)), (108, ONE)),  # 1 | 2 << 4, less 32
    "Q4_K": ((0, ONE), (2, ONE), (4, SIX_BIT_ONES)),
    "Q5_K": ((0, ONE), (2, ONE), (4, SIX_BIT_ONES)),
    "Q6_K": ((192, bytes([1] * 16)), (208, ONE)),
    "IQ4_NL": ((0, ONE),),
    "IQ4_XS": ((0, ONE), (2, bytes([0xAA] * 2)), (4, bytes([0x11] * 4))),
    "MXFP4": ((0, bytes([128])),),  # levels are doubled, 2^(128 - 127) / 2
}


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(seed: int, *shape: int) -> Array:
    return generator(seed).standard_normal(shape).astype(np.float32)


def i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def stored(x: Array, kind: str = "F32") -> StoredTensor:
    return StoredTensor("w", kind, x.shape, blocks.encode(kind, x))


def any_bytes(kind: str, shape: tuple[int, int], seed: int) -> StoredTensor:
    """Every bit random: scales may be infinite or not a number."""
    data = generator(seed).integers(0, 256, blocks.num_bytes(kind, shape), np.uint8)
    return StoredTensor("w", kind, shape, data)


def raw_blocks(kind: str, shape: tuple[int, int], seed: int) -> StoredTensor:
    """Random bytes with finite scales of either sign."""
    if kind in FLOAT_KINDS:
        return stored(normal(seed, *shape) * np.float32(3), kind)
    tensor = any_bytes(kind, shape, seed)
    rows = tensor.data.reshape(-1, blocks.KINDS[kind].block_bytes)
    for offset in HALVES[kind]:
        scales = normal(seed + offset, len(rows)).astype("<f2")
        rows[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        rows[:, 0] = generator(seed).integers(120, 134, len(rows), np.uint8)
    return tensor


def unit_blocks(kind: str, shape: tuple[int, int], fill: int | None, seed: int = 0) -> StoredTensor:
    """Blocks whose values are the bare integers: bytes `fill` (None: random), scales 1, mins 0."""
    tensor = any_bytes(kind, shape, seed)
    if fill is not None:
        tensor.data[:] = fill
    rows = tensor.data.reshape(-1, blocks.KINDS[kind].block_bytes)
    for offset, field in UNIT_FIELDS[kind]:
        rows[:, offset : offset + len(field)] = np.frombuffer(field, np.uint8)
    return tensor


def native_weight(tensor: StoredTensor, num_threads: int = 1) -> _native.Weight:
    (n, k), type_id = tensor.shape, blocks.KINDS[tensor.kind].type_id
    return _native.make_weight(type_id, [tensor.data], [n], k, _native.Pool(num_threads))


def native_vector(x: Array) -> _native.Weight:
    """A bias as the backend packs it."""
    return native_weight(stored(x.reshape(-1, 1)))


def decoded(tensor: StoredTensor) -> Array:
    return blocks.decode(tensor.kind, tensor.data, tensor.shape)


def widths_of(kind: str) -> tuple[int, ...]:
    """Row lengths worth testing: one block, several; for floats also odd ones."""
    size = blocks.KINDS[kind].block_elements
    return {1: (1, 3, 33, 64), 32: (32, 160), 256: (256, 768)}[size]


def same_bits(a: Array, b: Array) -> bool:
    """Equal as bit patterns: tells -0 from 0, and NaN equals itself."""
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))
