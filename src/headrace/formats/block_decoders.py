"""Stored blocks to float32, one function per block kind, vectorised over blocks.

Each decoder takes `raw` [num_blocks, block_bytes] uint8 and returns [num_blocks, block_elements]
float32. Leaves only: sizes, names and shapes are checked by `blocks`, which calls these.
The arithmetic follows ggml (`ggml-quants.c`, dequantize_row_*) operation by operation, in
float32, so that results agree bit for bit with its scalar code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

# IQ4_NL and IQ4_XS index this fixed table of int8 (ggml: kvalues_iq4nl).
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# E2M1 values times two; the scale is halved to match (ggml: kvalues_mxfp4).
FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def half(raw: U8, at: int) -> F32:
    """The float16 at byte `at` of every block, as a float32 column [num_blocks, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def nibbles(packed: U8) -> U8:
    """[..., n] bytes -> [..., 2n]: all low nibbles of a run, then all its high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def fifth_bits(raw: U8, at: int) -> U8:
    """Bit i of the little-endian u32 at byte `at`, for the 32 elements i of each block."""
    return np.unpackbits(np.ascontiguousarray(raw[:, at : at + 4]), axis=1, bitorder="little")


def decode_f32(raw: U8) -> F32:
    return np.ascontiguousarray(raw).view("<f4").astype(np.float32, copy=False)


def decode_f16(raw: U8) -> F32:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def decode_bf16(raw: U8) -> F32:
    return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16).view(np.float32)


def decode_q4_0(raw: U8) -> F32:
    return half(raw, 0) * (nibbles(raw[:, 2:]).astype(np.float32) - 8)


def decode_q4_1(raw: U8) -> F32:
    return half(raw, 0) * nibbles(raw[:, 4:]).astype(np.float32) + half(raw, 2)


def decode_q5_0(raw: U8) -> F32:
    quants = nibbles(raw[:, 6:]) | (fifth_bits(raw, 2) << 4)
    return half(raw, 0) * (quants.astype(np.float32) - 16)


def decode_q5_1(raw: U8) -> F32:
    quants = nibbles(raw[:, 8:]) | (fifth_bits(raw, 4) << 4)
    return half(raw, 0) * quants.astype(np.float32) + half(raw, 2)


def decode_q8_0(raw: U8) -> F32:
    return half(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)


def two_bits(packed: U8) -> U8:
    """[n, 64] -> [n, 256]: each 32-byte run holds four planes of 32 two-bit values."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    planes: U8 = (packed.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    return planes.reshape(-1, 256)


def decode_q2_k(raw: U8) -> F32:
    scales, quants = raw[:, :16], two_bits(raw[:, 16:80])
    scale = half(raw, 80) * (scales & 15).astype(np.float32)
    minimum = half(raw, 82) * (scales >> 4).astype(np.float32)
    return _by_group(quants, 16, scale, minimum)


def decode_q3_k(raw: U8) -> F32:
    packed = raw[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high = ((packed[:, None, 8:] >> shifts) & 3).reshape(-1, 16)
    scales = (low | (high << 4)).astype(np.float32) - 32
    planes = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    is_high = ((raw[:, None, :32] >> planes) & 1).reshape(-1, 256)
    quants = two_bits(raw[:, 32:96]).astype(np.float32) - 4 * (1 - is_high.astype(np.float32))
    return _by_group(quants, 16, half(raw, 108) * scales)


def scales_and_mins(packed: U8) -> tuple[U8, U8]:
    """The 12 bytes of Q4_K and Q5_K: eight six-bit scales and eight six-bit minimums."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, mins


def decode_q4_k(raw: U8) -> F32:
    scales, mins = scales_and_mins(raw[:, 4:16])
    quants = nibbles(raw[:, 16:].reshape(-1, 4, 32))
    return _by_group(quants, 8, half(raw, 0) * scales, half(raw, 2) * mins)


def decode_q5_k(raw: U8) -> F32:
    scales, mins = scales_and_mins(raw[:, 4:16])
    planes = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = ((raw[:, None, 16:48] >> planes) & 1).reshape(-1, 256)
    quants = nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | (fifth << 4)
    return _by_group(quants, 8, half(raw, 0) * scales, half(raw, 2) * mins)


def decode_q6_k(raw: U8) -> F32:
    low = nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    quants = (low | (two_bits(raw[:, 128:192]) << 4)).astype(np.float32) - 32
    scales = raw[:, 192:208].view(np.int8).astype(np.float32)
    return _by_group(quants, 16, half(raw, 208) * scales)


def decode_iq4_nl(raw: U8) -> F32:
    return half(raw, 0) * IQ4_VALUES[nibbles(raw[:, 2:])]


def decode_iq4_xs(raw: U8) -> F32:
    low = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    word = np.ascontiguousarray(raw[:, 2:4]).view("<u2")
    high = (word >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (low | (high << 4)).astype(np.float32) - 32
    quants = IQ4_VALUES[nibbles(raw[:, 8:].reshape(-1, 8, 16))]
    return _by_group(quants, 8, half(raw, 0) * scales)


def decode_mxfp4(raw: U8) -> F32:
    scale = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128)
    return scale * FP4_DOUBLED[nibbles(raw[:, 1:])]


def _by_group(
    quants: NDArray[np.generic], groups: int, scale: F32, minimum: F32 | None = None
) -> F32:
    """scale * quant - minimum with `groups` scales per block of 256."""
    values = quants.reshape(-1, groups, 256 // groups).astype(np.float32, copy=False)
    result = values * scale[:, :, None]
    if minimum is not None:
        result -= minimum[:, :, None]
    return result.reshape(-1, 256)


DECODERS: Mapping[str, Callable[[U8], F32]] = {
    "F32": decode_f32,
    "F16": decode_f16,
    "BF16": decode_bf16,
    "Q4_0": decode_q4_0,
    "Q4_1": decode_q4_1,
    "Q5_0": decode_q5_0,
    "Q5_1": decode_q5_1,
    "Q8_0": decode_q8_0,
    "Q2_K": decode_q2_k,
    "Q3_K": decode_q3_k,
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
    "IQ4_NL": decode_iq4_nl,
    "IQ4_XS": decode_iq4_xs,
    "MXFP4": decode_mxfp4,
}
