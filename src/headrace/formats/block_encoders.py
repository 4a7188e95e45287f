"""float32 to stored blocks, one function per block kind, vectorised over blocks.

Each encoder takes x [num_blocks, block_elements] float32 (finite) and returns
[num_blocks, block_bytes] uint8. Simple round-to-nearest of valid blocks: Q4_0 to Q8_0 choose
scales as ggml's reference quantisers do (`ggml-quants.c`, quantize_row_*_ref); the k-quants,
IQ4_* and MXFP4 take scales from the extremes of each group, without ggml's error search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.formats.block_decoders import FP4_DOUBLED, IQ4_VALUES

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
Bits = NDArray[np.integer[Any]]  # uint8 in fact; numpy's types widen `array & literal`

FP4_ROUND_UP = 127 - 2  # E8M0 bias, less the largest E2M1 exponent (6 = 1.5 * 2^2)


def encode_f32(x: F32) -> U8:
    return np.ascontiguousarray(x, "<f4").view(np.uint8)


def encode_f16(x: F32) -> U8:
    return np.ascontiguousarray(x.astype("<f2")).view(np.uint8)


def encode_bf16(x: F32) -> U8:
    """Round to nearest even; a NaN stays a NaN (quiet bit set)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    result = np.where(np.isnan(x), (bits >> 16) | 64, rounded)
    return np.ascontiguousarray(result.astype("<u2")).view(np.uint8)


def encode_q4_0(x: F32) -> U8:
    scale = _extreme(x) / np.float32(-8)
    quants = np.clip(np.trunc(x * _inverse(scale) + 8.5), 0, 15).astype(np.uint8)
    return _join(_half(scale), _pack(quants))


def encode_q4_1(x: F32) -> U8:
    low = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - low) / np.float32(15)
    quants = np.clip(np.trunc((x - low) * _inverse(scale) + 0.5), 0, 15).astype(np.uint8)
    return _join(_half(scale), _half(low), _pack(quants))


def encode_q5_0(x: F32) -> U8:
    scale = _extreme(x) / np.float32(-16)
    quants = np.clip(np.trunc(x * _inverse(scale) + 16.5), 0, 31).astype(np.uint8)
    return _join(_half(scale), _fifths(quants), _pack(quants & 15))


def encode_q5_1(x: F32) -> U8:
    low = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - low) / np.float32(31)
    quants = np.clip(np.trunc((x - low) * _inverse(scale) + 0.5), 0, 31).astype(np.uint8)
    return _join(_half(scale), _half(low), _fifths(quants), _pack(quants & 15))


def encode_q8_0(x: F32) -> U8:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(scale)
    # Half away from zero (roundf). Not trunc(x + 0.5): 0.49999997 + 0.5 is 1.0 in float32.
    quants = np.where(np.abs(scaled - np.trunc(scaled)) >= 0.5, np.sign(scaled), 0)
    quants = (np.trunc(scaled) + quants).astype(np.int8)
    return _join(_half(scale), quants.view(np.uint8))


def encode_q2_k(x: F32) -> U8:
    quants, scales, mins, d, dmin = _affine_groups(x, groups=16, top=3, scale_top=15)
    return _join(scales | (mins << 4), _pack_two_bits(quants), _half(d), _half(dmin))


def encode_q3_k(x: F32) -> U8:
    quants, scales, d = _signed_groups(x, groups=16, low=-4, scale_top=31)
    codes, sixes = (quants + 4).astype(np.uint8), (scales + 32).astype(np.uint8)
    mask = np.zeros((len(x), 32), np.uint8)
    for plane in range(8):
        mask |= (codes.reshape(-1, 8, 32)[:, plane] >> 2) << plane
    high = np.zeros((len(x), 4), np.uint8)
    for part in range(4):
        high |= (sixes[:, 4 * part : 4 * part + 4] >> 4) << (2 * part)
    low = (sixes[:, :8] & 15) | ((sixes[:, 8:] & 15) << 4)
    return _join(mask, _pack_two_bits(codes & 3), low, high, _half(d))


def encode_q4_k(x: F32) -> U8:
    quants, scales, mins, d, dmin = _affine_groups(x, groups=8, top=15, scale_top=63)
    packed = _pack(quants.reshape(-1, 4, 64)).reshape(-1, 128)
    return _join(_half(d), _half(dmin), _pack_sixes(scales, mins), packed)


def encode_q5_k(x: F32) -> U8:
    quants, scales, mins, d, dmin = _affine_groups(x, groups=8, top=31, scale_top=63)
    fifths = np.zeros((len(x), 32), np.uint8)
    for plane in range(8):
        fifths |= (quants.reshape(-1, 8, 32)[:, plane] >> 4) << plane
    packed = _pack((quants & 15).reshape(-1, 4, 64)).reshape(-1, 128)
    return _join(_half(d), _half(dmin), _pack_sixes(scales, mins), fifths, packed)


def encode_q6_k(x: F32) -> U8:
    quants, scales, d = _signed_groups(x, groups=16, low=-32, scale_top=127)
    codes = (quants + 32).astype(np.uint8)
    low = _pack((codes & 15).reshape(-1, 2, 128)).reshape(-1, 128)
    return _join(low, _pack_two_bits(codes >> 4), scales.astype(np.int8).view(np.uint8), _half(d))


def encode_iq4_nl(x: F32) -> U8:
    scale = _as_stored(_extreme(x) / IQ4_VALUES[0])
    return _join(_half(scale), _pack(_nearest(x * _inverse(scale), IQ4_VALUES)))


def encode_iq4_xs(x: F32) -> U8:
    grouped = x.reshape(-1, 8, 32)
    wanted = _extreme(grouped)[:, :, 0] / IQ4_VALUES[0]
    d = _as_stored(np.abs(wanted).max(axis=1, keepdims=True) / np.float32(31))
    scales = np.clip(np.rint(wanted * _inverse(d)), -32, 31).astype(np.float32)
    codes = _nearest(grouped * _inverse(d * scales)[:, :, None], IQ4_VALUES)
    sixes = (scales + 32).astype(np.uint8)
    word = np.zeros((len(x), 1), "<u2")
    for group in range(8):
        word[:, 0] |= (sixes[:, group].astype(np.uint16) >> 4) << (2 * group)
    low = (sixes[:, 0::2] & 15) | ((sixes[:, 1::2] & 15) << 4)
    return _join(_half(d), word.view(np.uint8), low, _pack(codes).reshape(-1, 128))


def encode_mxfp4(x: F32) -> U8:
    largest = np.abs(x).max(axis=1, keepdims=True)
    exponent = np.frexp(largest)[1] - 1 + FP4_ROUND_UP
    exponent = np.where(largest > 0, np.clip(exponent, 0, 254), 0).astype(np.int32)
    scaled = np.ldexp(x.astype(np.float64), 128 - exponent).astype(np.float32)
    return _join(exponent.astype(np.uint8), _pack(_nearest(scaled, FP4_DOUBLED)))


# ---- shared pieces


def _affine_groups(x: F32, groups: int, top: int, scale_top: int) -> tuple[U8, U8, U8, F32, F32]:
    """Quants [n, 256], scales and mins [n, groups], d and dmin [n, 1] of x ~ d*s*q - dmin*m."""
    grouped = x.reshape(-1, groups, 256 // groups)
    low = np.minimum(grouped.min(axis=2), 0)
    wanted = (grouped.max(axis=2) - low) / np.float32(top)
    d = _as_stored(wanted.max(axis=1, keepdims=True) / np.float32(scale_top))
    dmin = _as_stored((-low).max(axis=1, keepdims=True) / np.float32(scale_top))
    scales = np.clip(np.rint(wanted * _inverse(d)), 0, scale_top).astype(np.uint8)
    mins = np.clip(np.rint(-low * _inverse(dmin)), 0, scale_top).astype(np.uint8)
    shifted = grouped + (dmin * mins)[:, :, None]
    quants = np.clip(np.rint(shifted * _inverse(d * scales)[:, :, None]), 0, top)
    return quants.reshape(-1, 256).astype(np.uint8), scales, mins, d, dmin


def _signed_groups(x: F32, groups: int, low: int, scale_top: int) -> tuple[F32, F32, F32]:
    """Quants [n, 256] in low..-low-1, scales [n, groups], d [n, 1] of x ~ d*s*q."""
    grouped = x.reshape(-1, groups, 256 // groups)
    wanted = _extreme(grouped)[:, :, 0] / np.float32(low)
    d = _as_stored(np.abs(wanted).max(axis=1, keepdims=True) / np.float32(scale_top))
    scales = np.clip(np.rint(wanted * _inverse(d)), -scale_top - 1, scale_top).astype(np.float32)
    quants = np.clip(np.rint(grouped * _inverse(d * scales)[:, :, None]), low, -low - 1)
    return quants.reshape(-1, 256).astype(np.float32), scales, d


def _extreme(x: F32) -> F32:
    """The element of largest magnitude along the last axis, sign kept; the first one of equals."""
    at = np.abs(x).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(x, at, axis=-1)


def _inverse(scale: F32) -> F32:
    """1 / scale, and 0 for 0 or where the inverse is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0)).astype(np.float32)


def _nearest(x: F32, table: F32) -> U8:
    """Index of the nearest table entry; the lower value wins a tie."""
    order = np.argsort(table, kind="stable")
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(middles, x)].astype(np.uint8)


def _as_stored(scale: F32) -> F32:
    """What a decoder will read back: the scale after rounding to float16."""
    return scale.astype(np.float16).astype(np.float32)


def _half(values: F32) -> U8:
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8)


def _pack(quants: Bits) -> U8:
    """[..., 2n] values below 16 -> [..., n]: the first half low nibbles, the second half high."""
    middle = quants.shape[-1] // 2
    packed = quants[..., :middle] | (quants[..., middle:] << 4)
    return packed.astype(np.uint8, copy=False)


def _fifths(quants: Bits) -> U8:
    return np.packbits((quants >> 4).astype(np.uint8), axis=1, bitorder="little")


def _pack_two_bits(quants: Bits) -> U8:
    planes = quants.reshape(-1, 2, 4, 32)
    packed = planes[:, :, 0] | planes[:, :, 1] << 2 | planes[:, :, 2] << 4 | planes[:, :, 3] << 6
    return packed.reshape(-1, 64).astype(np.uint8, copy=False)


def _pack_sixes(scales: U8, mins: U8) -> U8:
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = mins[:, :4] | ((mins[:, 4:] >> 4) << 6)
    return np.concatenate([first, second, (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)], axis=1)


def _join(*parts: Bits) -> U8:
    return np.concatenate(parts, axis=1).astype(np.uint8, copy=False)


ENCODERS: Mapping[str, Callable[[F32], U8]] = {
    "F32": encode_f32,
    "F16": encode_f16,
    "BF16": encode_bf16,
    "Q4_0": encode_q4_0,
    "Q4_1": encode_q4_1,
    "Q5_0": encode_q5_0,
    "Q5_1": encode_q5_1,
    "Q8_0": encode_q8_0,
    "Q2_K": encode_q2_k,
    "Q3_K": encode_q3_k,
    "Q4_K": encode_q4_k,
    "Q5_K": encode_q5_k,
    "Q6_K": encode_q6_k,
    "IQ4_NL": encode_iq4_nl,
    "IQ4_XS": encode_iq4_xs,
    "MXFP4": encode_mxfp4,
}
