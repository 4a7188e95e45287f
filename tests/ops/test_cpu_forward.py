"""Compiled forwards on the native backend: each op by itself, then whole decoders.

Values are compared with `ReferenceOps`; what threads, ISAs, chunks and batch mates may change is
nothing, bit for bit. Attention has its own file, linears too.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forwards import DECODER_KV, Build, Op, Span, compiled, decoder, in_chunks, on_rows_of, step_of
from kernel_cases import (
    ISAS,
    KINDS,
    Array,
    decoded,
    i32,
    native_weight,
    normal,
    raw_blocks,
    same_bits,
    stored,
    widths_of,
)

from headrace import _native
from headrace.backends.cpu import CpuOps
from headrace.backends.ops import (
    Batch,
    CompiledForward,
    Forward,
    KVSpec,
    Limits,
    Ops,
    Rope,
    Tensor,
)
from headrace.backends.reference import ReferenceOps
from headrace.types import StoredTensor

NATIVE = {isa: CpuOps(2, isa) for isa in ISAS}
SMALL_KV = KVSpec(1, 1, 16, 2, "f32")
NUM_ROWS = 17

# A few float32 roundings (6e-8 each); sums of squares add up in another order than numpy's.
ROUNDING = 1e-6


def run_op(ops: Ops, op: Op, table: Array, first: int = 0, spec: KVSpec = SMALL_KV) -> Array:
    """All rows of the table through `op`, as one sequence that starts at position `first`."""
    n = len(table)
    run = compiled(ops, on_rows_of(table, op), spec, n, 1)
    pages = range(spec.num_pages)
    return run(step_of([Span(first, first + n, pages, -first)])).copy()


def check(op: Op, table: Array, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Reference values, the same bits from every ISA, and the same bits for a row alone."""
    expected = run_op(ReferenceOps(), op, table)
    for ops in NATIVE.values():
        got = run_op(ops, op, table)
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)
        assert same_bits(got, run_op(NATIVE[ISAS[0]], op, table))
        run = compiled(ops, on_rows_of(table, op), SMALL_KV, 1, 1)
        assert same_bits(in_chunks(run, Span(0, len(table), [1, 0]), 1), got)


# ---- ops one by one


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_decoded_exactly(kind: str) -> None:
    tensor = raw_blocks(kind, (19, widths_of(kind)[-1]), seed=1)
    build = plain(tensor)
    run = compiled(NATIVE[ISAS[0]], build, SMALL_KV, 19, 1)
    assert same_bits(run(step_of([Span(0, 19, [0, 1])])), decoded(tensor))


def plain(tensor: StoredTensor) -> Build:
    """Embedding and nothing else."""

    def build(ops: Ops) -> Forward:
        weight = ops.weight(tensor)

        def forward(ops: Ops, batch: Batch) -> Tensor:
            return ops.take_rows(ops.embedding(weight, batch.token_ids), batch.rows)

        return forward

    return build


@pytest.mark.parametrize(
    "rows", [[], [0], [16], [3, 3, 3], [16, 0, 8, 7, 1, 15, 8], list(range(16, -1, -1))], ids=len
)
def test_rows_come_in_the_order_asked_for(rows: list[int]) -> None:
    table = normal(2, NUM_ROWS, 21)
    for ops in NATIVE.values():
        run = compiled(ops, plain(stored(table)), SMALL_KV, NUM_ROWS, 1)
        got = run(step_of([Span(0, NUM_ROWS, [0, 1])], rows=i32(*rows)))
        assert got.shape == (len(rows), 21)
        assert same_bits(got.copy(), table[rows].reshape(-1, 21))


@pytest.mark.parametrize("width", [1, 5, 16, 37, 576])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_rms_norm(width: int, is_weighted: bool) -> None:
    gain = stored(normal(3, width))

    def op(ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        return ops.rms_norm(x, ops.weight(gain) if is_weighted else None, 1e-5)

    check(op, normal(4, NUM_ROWS, width), rtol=ROUNDING)


@pytest.mark.parametrize("head_dim", [4, 16, 20])
def test_rms_norm_of_each_head(head_dim: int) -> None:
    gain = stored(normal(5, head_dim))

    def op(ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        return ops.rms_norm(ops.reshape(x, 3, head_dim), ops.weight(gain), 0.1)

    check(op, normal(6, NUM_ROWS, 3 * head_dim), rtol=ROUNDING)


def frequencies(count: int) -> tuple[float, ...]:
    return tuple((1e4 ** -(np.arange(count) / count)).tolist())


def rotate(rope: Rope, head_dim: int) -> Op:
    return lambda ops, x, batch: ops.rope(ops.reshape(x, 3, head_dim), batch.positions, rope)


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "pairs"), [(16, 8), (20, 10), (20, 3), (64, 24), (6, 1)])
@pytest.mark.parametrize("factor", [1.0, 1.19])
def test_rope(is_interleaved: bool, head_dim: int, pairs: int, factor: float) -> None:
    op = rotate(Rope(frequencies(pairs), is_interleaved, factor), head_dim)
    check(op, normal(7, NUM_ROWS, 3 * head_dim), atol=4 * ROUNDING)  # components up to 4


def test_rope_keeps_its_precision_far_out() -> None:
    """At position 100,000 float32 angles are off by 4e-3."""
    first, table = 100_000, normal(8, 3, 48)
    spec = KVSpec(1, 1, 16, first // 16 + 2, "f16")
    op = rotate(Rope(frequencies(8), interleaved=False), 16)
    expected = run_op(ReferenceOps(), op, table, first, spec)
    got = run_op(NATIVE[ISAS[0]], op, table, first, spec)
    np.testing.assert_allclose(got, expected, atol=4 * ROUNDING)


def test_two_ropes_in_one_forward_keep_apart() -> None:
    slow, fast = Rope(frequencies(8), False), Rope(frequencies(4), True, 2.0)

    def op(ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        heads = ops.reshape(x, 3, 16)
        turned = ops.rope(heads, batch.positions, slow)
        return ops.add(turned, ops.rope(heads, batch.positions, fast))

    check(op, normal(9, NUM_ROWS, 48), atol=10 * ROUNDING)


def gate(activation: Any) -> Op:
    """The first half of a row gates the second."""

    def op(ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        return ops.glu(x, ops.scale(x, -0.5), activation)

    return op


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 16, 37])
def test_glu(activation: str, width: int) -> None:
    check(gate(activation), normal(10, NUM_ROWS, width) * 4, rtol=4 * ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_glu_far_out(activation: str) -> None:
    """Where exp overflows or vanishes the gate is closed or open, never wrong or NaN."""
    sizes = np.array([0, 1e-40, 1e-10, 20, 87, 88, 88.5, 89, 100, 1e10, 1e18], np.float32)
    table = np.concatenate([sizes, -sizes])[None]
    with np.errstate(over="ignore"):
        check(gate(activation), table, rtol=4 * ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("isa", ISAS)
def test_a_shut_gate_stays_shut_at_any_size(isa: str) -> None:
    x = np.full((1, 16), -3e38, np.float32)

    def op(ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        return ops.glu(x, ops.scale(x, 1e-38), "silu")

    assert not run_op(NATIVE[isa], op, x).any()


@pytest.mark.parametrize("cap", [1.0, 30.0])
@pytest.mark.parametrize("width", [1, 16, 37])
def test_softcap(cap: float, width: int) -> None:
    table = normal(11, NUM_ROWS, width) * np.float32(40)
    table[0], table[1] = 1e30, -1e30
    check(lambda ops, x, batch: ops.softcap(x, cap), table, atol=cap * ROUNDING)


@pytest.mark.parametrize("width", [1, 16, 37])
def test_sums_and_multiples_are_exact(width: int) -> None:
    def op(ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        return ops.add(x, ops.scale(x, 0.3))

    check(op, normal(12, NUM_ROWS, width))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("isa", ISAS)
def test_row_ops_pass_broken_numbers_on(isa: str, bad: float) -> None:
    ops = NATIVE[isa]
    table = normal(13, 9, 20)
    table[4, 7] = bad
    rope = Rope(frequencies(10), False)
    loud: list[Op] = [
        lambda ops, x, batch: ops.rms_norm(x, None, 1e-5),
        lambda ops, x, batch: ops.rope(ops.reshape(x, 1, 20), batch.positions, rope),
        lambda ops, x, batch: ops.add(x, x),
        lambda ops, x, batch: ops.scale(x, 0.5),
        lambda ops, x, batch: ops.glu(x, x, "silu"),
        lambda ops, x, batch: ops.glu(x, x, "gelu_tanh"),
    ]
    if np.isnan(bad):  # infinity is capped, rightly
        loud.append(lambda ops, x, batch: ops.softcap(x, 3.0))
    for op in loud:
        with np.errstate(invalid="ignore"):
            got = run_op(ops, op, table)
        assert not np.isfinite(got[4]).all()
        assert np.isfinite(np.delete(got, 4, axis=0)).all()


# ---- exp


@pytest.mark.parametrize("isa", ISAS)
def test_exp_is_accurate(isa: str) -> None:
    x = np.linspace(-87.6, 88, 200_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(_native.run_exp(isa, x) - exact) / exact
    assert error.max() < 2e-7  # promised in csrc/simd.h: about three roundings


@pytest.mark.parametrize("isa", ISAS)
def test_exp_at_its_ends(isa: str) -> None:
    nothing = np.array([-np.inf, -3e38, -1000, -88, -87.7], np.float32)
    assert same_bits(_native.run_exp(isa, nothing), np.zeros(5, np.float32))
    too_much = np.array([88.8, 100, 3e38, np.inf], np.float32)
    assert np.isinf(_native.run_exp(isa, too_much)).all()
    assert np.isnan(_native.run_exp(isa, np.array([np.nan, -np.nan], np.float32))).all()
    assert same_bits(_native.run_exp(isa, np.zeros(3, np.float32)), np.ones(3, np.float32))


def test_exp_has_the_same_bits_everywhere() -> None:
    x = np.concatenate([np.linspace(-100, 100, 20_001), [np.nan, np.inf, -np.inf]])
    bits = [_native.run_exp(isa, x.astype(np.float32)) for isa in ISAS]
    assert all(same_bits(bits[0], other) for other in bits)


# ---- linears in a program


@pytest.mark.parametrize("isa", ISAS)
def test_linears_that_share_an_input_keep_their_bits(isa: str) -> None:
    """Float, plain and split weights on one input, with and without bias."""
    kinds = ("Q4_K", "F16", "Q6_K", "Q8_0", "F32", "Q2_K")
    tensors = [raw_blocks(kind, (7 * i + 7, 256), i) for i, kind in enumerate(kinds)]
    table, bias = normal(14, NUM_ROWS, 256), normal(15, 21)

    def build(ops: Ops) -> Forward:
        weights = [ops.weight(tensor) for tensor in tensors]
        cuts = [ops.weight(first_columns(tensor.shape[0])) for tensor in tensors]
        embed, b = ops.weight(stored(table)), ops.weight(stored(bias))

        def forward(ops: Ops, batch: Batch) -> Tensor:
            x = ops.embedding(embed, batch.token_ids)
            wide = [ops.linear(x, w, b if w.shape[0] == len(bias) else None) for w in weights]
            cut = [ops.linear(y, c) for y, c in zip(wide, cuts, strict=True)]
            return ops.take_rows(functools.reduce(ops.add, cut), batch.rows)

        return forward

    run = compiled(NATIVE[isa], build, SMALL_KV, NUM_ROWS, 1)
    got = run(step_of([Span(0, NUM_ROWS, [0, 1])]))
    alone = [_native.run_linear(ISAS[0], native_weight(tensor), None, table) for tensor in tensors]
    alone[2] += bias
    assert same_bits(got.copy(), functools.reduce(np.add, [y[:, :7] for y in alone]))


def first_columns(width: int) -> StoredTensor:
    """A float matrix that keeps the first seven elements: products with 1 and 0 are exact."""
    return stored(np.eye(7, width, dtype=np.float32))


# ---- whole decoders

FLOATS = dict.fromkeys(("embed", "q", "k", "v", "o", "gate", "up", "down", "head"), "F32")
FLOATS |= {"k": "F16", "o": "BF16", "up": "F16"}
BLOCKS = {
    "embed": "Q6_K",
    "q": "Q4_K",
    "k": "Q6_K",
    "v": "Q8_0",
    "o": "Q4_0",
    "gate": "Q4_1",
    "up": "Q5_K",
    "down": "IQ4_XS",
    "head": "Q2_K",
}
LENGTH = 45
PAGES = (9, 2, 14)

# Of the largest logit. Floats: rounding through two layers (1e-6). Blocks: activations to 8 bits,
# off by up to 0.4% each, through a dozen matrices (0.013).
FLOAT_DECODER = 1e-5
BLOCK_DECODER = 0.05


def run_decoder(ops: Ops, kinds: dict[str, str], spec: KVSpec = DECODER_KV) -> CompiledForward:
    return compiled(ops, decoder(kinds), spec, 2 * LENGTH, 3)


@pytest.mark.parametrize(
    ("kinds", "tolerance"),
    [(FLOATS, FLOAT_DECODER), (BLOCKS, BLOCK_DECODER)],
    ids=["float", "block"],
)
def test_a_decoder_agrees_with_the_reference(kinds: dict[str, str], tolerance: float) -> None:
    step, spec = step_of([Span(0, LENGTH, PAGES)]), replace(DECODER_KV, dtype="f32")
    expected = run_decoder(ReferenceOps(batch_invariant=False), kinds, spec)(step)
    got = run_decoder(NATIVE[ISAS[0]], kinds, spec)(step)
    assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("kinds", [FLOATS, BLOCKS], ids=["float", "block"])
def test_threads_isas_and_chunks_change_no_bit_of_a_decoder(kinds: dict[str, str]) -> None:
    whole = Span(0, LENGTH, PAGES)
    expected = run_decoder(NATIVE[ISAS[0]], kinds)(step_of([whole])).copy()
    for isa in ISAS:
        run = run_decoder(NATIVE[isa], kinds)
        for size in (1, 7, 16, 44, LENGTH):
            assert same_bits(in_chunks(run, whole, size), expected), (isa, size)
    for threads in (1, 3, 5):
        run = run_decoder(CpuOps(threads), kinds)
        assert same_bits(run(step_of([whole])).copy(), expected), threads
        assert same_bits(in_chunks(run, whole, 1), expected), threads


@pytest.mark.parametrize("isa", ISAS)
def test_batch_mates_change_no_bit_of_a_decoder(isa: str) -> None:
    run = run_decoder(NATIVE[isa], BLOCKS)
    expected = run(step_of([Span(0, LENGTH, PAGES)])).copy()
    got = []
    for i, begin in enumerate(range(0, LENGTH, 9)):
        mine = Span(begin, begin + 9, PAGES)
        before, after = Span(i, i + 1, [4], 1), Span(2 * i, 2 * i + 2, [7], 2)
        got.append(run(step_of([before, mine, after]))[1:10].copy())
    assert same_bits(np.concatenate(got), expected)


def test_programs_of_one_pool_run_in_turns() -> None:
    """Two models on one `CpuOps`, interleaved; logits stay until the next call of their own."""
    ops = NATIVE[ISAS[0]]
    first, second = run_decoder(ops, FLOATS), run_decoder(ops, BLOCKS)
    step = step_of([Span(0, LENGTH, PAGES)])
    a, b = first(step), second(step)
    kept_a, kept_b = a.copy(), b.copy()
    assert same_bits(a, kept_a)
    assert same_bits(first(step), kept_a)
    assert same_bits(second(step), kept_b)


def test_compiling_again_starts_afresh() -> None:
    """A forward that raised while it was recorded leaves nothing behind."""
    ops = CpuOps(1)

    def broken(ops: Ops, batch: Batch) -> Tensor:
        ops.embedding(ops.weight(stored(normal(1, 4, 16))), batch.token_ids)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        ops.compile(broken, ops.kv_pool(SMALL_KV), Limits(4, 1, 4, 16))
    table = normal(2, 4, 16)
    got = run_op(ops, lambda ops, x, batch: ops.scale(x, 2.0), table)
    assert np.array_equal(got, table * 2)
