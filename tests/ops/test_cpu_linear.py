"""Native linears and packed weights, for every block kind and every ISA of this machine.

Expected values: `blocks.decode` for single weights, exactly; for products a float64 sum over
activations that numpy quantises by the rule of csrc/gemm.inl (int8 per 16, scale = largest / 127,
halves to even). An ISA, a tile size or a batch mate may change nothing: compared bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from kernel_cases import (
    FLOAT_KINDS,
    ISAS,
    KINDS,
    QUANT_KINDS,
    Array,
    any_bytes,
    decoded,
    generator,
    native_vector,
    native_weight,
    normal,
    raw_blocks,
    same_bits,
    stored,
    unit_blocks,
    widths_of,
)
from numpy.typing import NDArray

from headrace import _native
from headrace.formats import blocks
from headrace.types import StoredTensor

Doubles = NDArray[np.float64]
MakeBlocks = Callable[[str, tuple[int, int], int], StoredTensor]

ROWS = (1, 5, 16, 17, 40)
TOKENS = (*range(1, 10), 16, 17)

# Of the sum of |terms|: roundings of 2^-24 that partly cancel reach 1e-7 here; one activation of
# 768 quantised a step wrong shows as 6e-6.
PRODUCT_TOLERANCE = 4e-7

# The largest magnitude whose inverse is taken to overflow (csrc/gemm.inl): below, a group is zero.
SMALLEST_GROUP = np.float32(1e-36)


def quantised(x: Array) -> Doubles:
    """int8 activations times their scales, as float64 of the float32 rule."""
    groups = x.reshape(len(x), -1, 16)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.float32(127) / np.maximum(largest, SMALLEST_GROUP)
    inverse = np.where(largest < SMALLEST_GROUP, np.float32(0), inverse)
    q = np.rint(groups * inverse)
    scale = largest / np.float32(127)
    values: Doubles = (q.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)
    return values


def expected_product(x: Array, tensor: StoredTensor) -> tuple[Doubles, Doubles]:
    """The product in float64, and the size of its terms.

    Scale and minimum of a weight are multiplied apart, so a term counts as the row's largest.
    """
    values = x.astype(np.float64) if tensor.kind in FLOAT_KINDS else quantised(x)
    weight = decoded(tensor).astype(np.float64)
    terms = np.abs(values).sum(-1, keepdims=True) * np.abs(weight).max(-1)
    return values @ weight.T, terms


def run(tensor: StoredTensor, x: Array, isa: str = ISAS[0], bias: Array | None = None) -> Array:
    native_bias = None if bias is None else native_vector(bias)
    return _native.run_linear(isa, native_weight(tensor), native_bias, x)


def encoded_blocks(kind: str, shape: tuple[int, int], seed: int) -> StoredTensor:
    return stored(normal(seed, *shape), kind)


SORTS = pytest.mark.parametrize("make", [encoded_blocks, raw_blocks], ids=["encoded", "raw"])
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)


# ---- packed weights


@EVERY_KIND
@pytest.mark.parametrize("make", [encoded_blocks, any_bytes], ids=["encoded", "any bytes"])
def test_a_row_of_a_packed_weight_is_what_decode_says(kind: str, make: MakeBlocks) -> None:
    for n, k in itertools.product((1, 17), widths_of(kind)):
        tensor = make(kind, (n, k), n + k)
        weight, expected = native_weight(tensor), decoded(tensor)
        assert weight.shape == (n, k)
        assert weight.is_float == (kind in FLOAT_KINDS)
        for i in range(n):
            row = weight.row(i)
            is_nan = np.isnan(expected[i])  # NaN by NaN: their payloads mean nothing
            assert np.array_equal(np.isnan(row), is_nan)
            assert same_bits(row[~is_nan], expected[i][~is_nan])


@EVERY_KIND
def test_shards_stack_into_one_matrix(kind: str) -> None:
    k, rows = widths_of(kind)[-1], (3, 16, 1, 13)
    parts = [raw_blocks(kind, (n, k), seed=n) for n in rows]
    data, type_id = [part.data for part in parts], blocks.KINDS[kind].type_id
    weight = _native.make_weight(type_id, data, list(rows), k, _native.Pool(1))
    expected = np.concatenate([decoded(part) for part in parts])
    assert same_bits(np.stack([weight.row(i) for i in range(sum(rows))]), expected)


def test_packing_does_not_depend_on_threads() -> None:
    tensor = raw_blocks("Q4_K", (100, 512), seed=1)
    rows = [
        np.stack([native_weight(tensor, threads).row(i) for i in range(100)])
        for threads in (1, 3, 5)
    ]
    assert same_bits(rows[0], rows[1])
    assert same_bits(rows[0], rows[2])


# ---- products


@EVERY_KIND
@SORTS
def test_a_product_is_the_float64_sum(kind: str, make: MakeBlocks) -> None:
    for n, k in itertools.product(ROWS, widths_of(kind)):
        x, tensor = normal(n, 17, k), make(kind, (n, k), k)
        expected, terms = expected_product(x, tensor)
        error = np.abs(run(tensor, x) - expected) / terms
        assert error.max() < PRODUCT_TOLERANCE, (n, k)


@EVERY_KIND
@SORTS
def test_tile_sizes_batch_mates_and_isas_change_no_bit(kind: str, make: MakeBlocks) -> None:
    for n, k in itertools.product(ROWS, widths_of(kind)):
        x = normal(n, max(TOKENS), k)
        weight = native_weight(make(kind, (n, k), k))
        whole = _native.run_linear(ISAS[0], weight, None, x)
        for isa in ISAS:
            for tokens in TOKENS:
                got = _native.run_linear(isa, weight, None, x[:tokens])
                assert same_bits(got, whole[:tokens]), (isa, n, k, tokens)
            alone = [_native.run_linear(isa, weight, None, row[None])[0] for row in x]
            assert same_bits(np.stack(alone), whole), (isa, n, k)


@EVERY_ISA
@EVERY_KIND
def test_a_bias_is_added_last(isa: str, kind: str) -> None:
    for n in ROWS:
        k = widths_of(kind)[-1]
        x, bias, tensor = normal(1, 9, k), normal(2, n), raw_blocks(kind, (n, k), seed=n)
        assert same_bits(run(tensor, x, isa, bias), run(tensor, x, isa) + bias)


# ---- extreme inputs


@EVERY_ISA
@EVERY_KIND
def test_zeros_give_zero(isa: str, kind: str) -> None:
    k = widths_of(kind)[-1]
    got = run(raw_blocks(kind, (17, k), seed=3), np.zeros((3, k), np.float32), isa)
    assert not got.any()


@EVERY_ISA
@pytest.mark.parametrize("kind", QUANT_KINDS)
def test_a_group_too_small_to_invert_is_zero(isa: str, kind: str) -> None:
    k = widths_of(kind)[-1]
    x = normal(4, 2, k)
    x[0, :16] = 1e-38
    zeroed = x.copy()
    zeroed[0, :16] = 0
    tensor = raw_blocks(kind, (17, k), seed=5)
    assert np.array_equal(run(tensor, x, isa), run(tensor, zeroed, isa))


@EVERY_ISA
@EVERY_KIND
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_huge_and_tiny_activations_keep_their_precision(isa: str, kind: str, size: float) -> None:
    k = widths_of(kind)[-1]
    x, tensor = normal(6, 9, k) * np.float32(size), encoded_blocks(kind, (17, k), seed=7)
    expected, terms = expected_product(x, tensor)
    assert (np.abs(run(tensor, x, isa) - expected) / terms).max() < PRODUCT_TOLERANCE


@EVERY_ISA
@EVERY_KIND
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_broken_token_is_loud_and_alone(isa: str, kind: str, bad: float) -> None:
    k = widths_of(kind)[-1]
    x, tensor = normal(8, 9, k), raw_blocks(kind, (40, k), seed=9)
    healthy = run(tensor, x, isa)
    for position in (0, k // 2, k - 1):
        broken = x.copy()
        broken[4, position] = bad
        got = run(tensor, broken, isa)
        assert not np.isfinite(got[4]).any(), position
        others = np.arange(9) != 4
        assert same_bits(got[others], healthy[others])


@EVERY_ISA
@pytest.mark.parametrize("kind", QUANT_KINDS)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F, 0x88, None])
def test_integer_sums_are_exact_at_the_extremes(isa: str, kind: str, fill: int | None) -> None:
    """All weights at the ends of their range, all activations +-127: no lane may saturate."""
    k = widths_of(kind)[-1] // 3 * 2 if widths_of(kind)[0] == 256 else 96
    tensor = unit_blocks(kind, (17, k), fill, seed=10)
    weight = decoded(tensor)
    assert np.array_equal(weight, np.rint(weight)), "bare integers"
    signs = generator(11).choice(np.array([-127, 127], np.float32), (6, k))
    signs[0], signs[1], signs[2, ::2], signs[2, 1::2] = 127, -127, 127, -127
    exact = signs.astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(signs).sum() * np.abs(weight).max() / 6 < 2**24, "float32 holds every sum"
    assert np.array_equal(run(tensor, signs, isa), exact)
