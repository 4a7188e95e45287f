"""The reference backend against formulas written out in float64, and its invariance bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backends import select
from headrace.backends.ops import (
    PAGE_SIZE,
    AttentionSpec,
    Batch,
    KVSpec,
    Limits,
    Rope,
    StepArrays,
)
from headrace.backends.reference import KVPool, ReferenceOps, check_step
from headrace.errors import InvalidRequest
from headrace.formats import blocks
from headrace.types import StoredTensor

Array = NDArray[np.float32]
BOTH = pytest.mark.parametrize(
    "ops", [ReferenceOps(True), ReferenceOps(False)], ids=["rows", "gemm"]
)
ROUNDING = 2e-6  # a few float32 roundings of sums of up to 100 terms of size 1


def i32(*values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(x: Array, kind: str = "F32") -> StoredTensor:
    return StoredTensor("w", kind, x.shape, blocks.encode(kind, x))


# ---- pointwise and matrices


@BOTH
def test_linear_is_x_times_weight_transposed_plus_bias(ops: ReferenceOps) -> None:
    x, w, b = normal(1, 5, 32), normal(2, 7, 32), normal(3, 7)
    expected = np.einsum("ti,oi->to", x.astype(np.float64), w.astype(np.float64)) + b
    got = ops.linear(x, ops.weight(stored(w)), ops.weight(stored(b)))
    np.testing.assert_allclose(got, expected, atol=10 * ROUNDING)  # sums reach 10
    assert got.dtype == np.float32


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(1, 70), st.integers(0, 99))
def test_a_row_of_linear_does_not_depend_on_the_others(
    rows: int, width: int, out: int, seed: int
) -> None:
    ops, x, w = ReferenceOps(), normal(seed, rows, width), normal(seed + 1, out, width)
    together = ops.linear(x, w)
    for i in range(rows):
        assert np.array_equal(together[i], ops.linear(x[i : i + 1], w)[0])


def test_quantised_weights_mean_what_blocks_decode_says() -> None:
    ops, w = ReferenceOps(), normal(4, 6, 64)
    tensor = stored(w, "Q4_1")
    assert np.array_equal(ops.weight(tensor), blocks.decode("Q4_1", tensor.data, (6, 64)))


def test_weight_rows_stacks_shards() -> None:
    ops, w = ReferenceOps(), normal(5, 6, 64)
    assert np.array_equal(ops.weight_rows((stored(w[:2]), stored(w[2:]))), w)


@pytest.mark.parametrize("shape", [(3, 10), (3, 4, 10)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, w = normal(6, *shape), normal(7, 10)
    scale = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) / 10 + 0.5)
    ops = ReferenceOps()
    np.testing.assert_allclose(ops.rms_norm(x, w, 0.5), x / scale * w, rtol=ROUNDING)
    np.testing.assert_allclose(ops.rms_norm(x, None, 0.5), x / scale, rtol=ROUNDING)


# Values from tables of the logistic and the normal distribution function.
@pytest.mark.parametrize(
    ("activation", "x", "expected"),
    [
        ("silu", 1.0, 0.7310585786),
        ("silu", -2.0, -0.2384058440),
        ("silu", -200.0, 0.0),
        ("silu", 200.0, 200.0),
        ("gelu", 1.0, 0.8413447461),
        ("gelu", -1.0, -0.1586552539),
        ("gelu", -30.0, 0.0),
        ("gelu_tanh", 1.0, 0.8411919906),
        ("gelu_tanh", -1.0, -0.1588080094),
        ("gelu_tanh", 1e20, 1e20),
    ],
)
def test_glu_activations(activation: Any, x: float, expected: float) -> None:
    gate, up = np.full((1, 2), x, np.float32), np.array([[1.0, -3.0]], np.float32)
    got = ReferenceOps().glu(gate, up, activation)
    np.testing.assert_allclose(got, [[expected, -3 * expected]], rtol=1e-6, atol=1e-7)


def test_small_ops() -> None:
    ops, x = ReferenceOps(), normal(8, 4, 6)
    assert np.array_equal(ops.add(x, x), ops.scale(x, 2.0))
    np.testing.assert_allclose(ops.softcap(x, 0.5), 0.5 * np.tanh(x / 0.5), rtol=1e-6)
    assert np.array_equal(ops.take_rows(x, i32(3, 0)), np.stack([x[3], x[0]]))
    assert np.array_equal(ops.embedding(x, i32(2, 2)), np.stack([x[2], x[2]]))
    assert ops.reshape(x, 2, 3).shape == (4, 2, 3)


@pytest.mark.parametrize("token", [-1, 4])
def test_token_ids_are_checked(token: int) -> None:
    with pytest.raises(AssertionError, match="token id"):
        ReferenceOps().embedding(normal(8, 4, 6), i32(token))


# ---- rope


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_as_complex_numbers(interleaved: bool) -> None:
    x, positions = normal(9, 4, 3, 10), i32(0, 1, 17, 8000)
    inv_freq = (1.0, 0.1, 0.003)
    got = ReferenceOps().rope(x, positions, Rope(inv_freq, interleaved, factor=1.25))
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 3) for i in range(3)]
    for t, position in enumerate(positions.tolist()):
        for h in range(3):
            for (a, b), freq in zip(pairs, inv_freq, strict=True):
                turn = 1.25 * complex(math.cos(position * freq), math.sin(position * freq))
                z = complex(x[t, h, a], x[t, h, b]) * turn
                np.testing.assert_allclose(got[t, h, [a, b]], [z.real, z.imag], atol=ROUNDING)
    assert np.array_equal(got[..., 6:], x[..., 6:])


# ---- attention


def naive_attention(
    q: Array, keys: Array, values: Array, position: int, spec: AttentionSpec
) -> NDArray[np.float64]:
    """One query [num_heads, head_dim] over keys of a sequence, by the definition."""
    group = q.shape[0] // keys.shape[1]
    out = np.zeros(q.shape)
    first = max(0, position - spec.window + 1) if spec.window else 0
    for h in range(q.shape[0]):
        scores = []
        for j in range(first, position + 1):
            score = float(np.dot(q[h].astype(np.float64), keys[j, h // group])) * spec.scale
            scores.append(spec.softcap * math.tanh(score / spec.softcap) if spec.softcap else score)
        weights = np.exp(np.array(scores) - max(scores))
        out[h] = weights / weights.sum() @ values[first : position + 1, h // group]
    return out


def run_attention(
    ops: ReferenceOps, pool: KVPool, step: StepArrays, qkv: tuple[Array, Array, Array], spec: Any
) -> Array:
    q, k, v = (np.ascontiguousarray(x) for x in qkv)
    batch = Batch(step.token_ids, step.positions, step.rows, step, pool)
    return ops.paged_attention(q, k, v, batch, spec).reshape(q.shape)


def step_of(spans: list[tuple[int, int]], tables: list[list[int]]) -> StepArrays:
    """Sequence s computes positions spans[s][0] to spans[s][1] - 1 on pages tables[s]."""
    positions = np.concatenate([np.arange(a, b) for a, b in spans]).astype(np.int32)
    width = max(len(table) for table in tables)
    padded = [table + [-1] * (width - len(table)) for table in tables]
    return StepArrays(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        cu_seqlens=np.cumsum([0] + [b - a for a, b in spans]).astype(np.int32),
        context_lens=i32(*(b for _, b in spans)),
        page_table=np.array(padded, np.int32),
        rows=i32(0),
    )


@BOTH
@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_is_its_definition(ops: ReferenceOps, window: int, softcap: float) -> None:
    n, spec = 37, AttentionSpec(1, 0.3, window, softcap)
    q, k, v = normal(10, n, 6, 8), normal(11, n, 2, 8), normal(12, n, 2, 8)
    pool = ops.kv_pool(KVSpec(2, 2, 8, 4, "f32"))
    got = run_attention(ops, pool, step_of([(0, n)], [[3, 0, 2]]), (q, k, v), spec)
    for position in range(n):
        expected = naive_attention(q[position], k, v, position, spec)
        np.testing.assert_allclose(got[position], expected, atol=1e-5)
    assert not pool.keys[0].any(), "only the layer named is written"


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_attention_bits_do_not_depend_on_chunks_mates_or_pages(data: st.DataObject) -> None:
    """A sequence in chunks, each with another sequence beside it, on other pages."""
    n = data.draw(st.integers(1, 50), "length")
    spec = AttentionSpec(0, 0.3, data.draw(st.sampled_from([0, 3, 16, 40]), "window"))
    ops, shape = ReferenceOps(), KVSpec(1, 2, 8, 12, data.draw(st.sampled_from(["f16", "f32"])))
    qkv = normal(13, n, 4, 8), normal(14, n, 2, 8), normal(15, n, 2, 8)
    alone = run_attention(ops, ops.kv_pool(shape), step_of([(0, n)], [[0, 1, 2, 3]]), qkv, spec)

    pages = data.draw(st.permutations(range(12)), "pages")
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1)), "cuts")) if n > 1 else []
    pool, mate, parts = ops.kv_pool(shape), 0, []
    for begin, end in zip([0, *cuts], [*cuts, n], strict=True):
        extra = data.draw(st.integers(0, 5), "mate's tokens")
        spans, tables = [(begin, end)], [list(pages[:4])]
        own, chunk = slice(extra, None), tuple(x[begin:end] for x in qkv)
        if extra and mate + extra <= 64:
            spans, tables = [(mate, mate + extra), *spans], [list(pages[4:8]), *tables]
            others = (normal(mate, extra, *x.shape[1:]) for x in qkv)
            chunk = tuple(np.concatenate(pair) for pair in zip(others, chunk, strict=True))
            mate += extra
        else:
            own = slice(None)
        q, k, v = chunk
        parts.append(run_attention(ops, pool, step_of(spans, tables), (q, k, v), spec)[own])
    assert np.array_equal(np.concatenate(parts), alone)


def test_f16_pool_holds_halves() -> None:
    ops, n, spec = ReferenceOps(), 20, AttentionSpec(0, 0.3)
    q, k, v = normal(16, n, 4, 8), normal(17, n, 2, 8), normal(18, n, 2, 8)
    step = step_of([(0, n)], [[0, 1]])
    half = run_attention(ops, ops.kv_pool(KVSpec(1, 2, 8, 2, "f16")), step, (q, k, v), spec)
    k16, v16 = k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)
    full = run_attention(ops, ops.kv_pool(KVSpec(1, 2, 8, 2, "f32")), step, (q, k16, v16), spec)
    assert np.array_equal(half, full)
    assert not np.array_equal(k, k16)


def test_keys_beyond_half_range_become_infinite_without_warning() -> None:
    ops = ReferenceOps()
    pool = ops.kv_pool(KVSpec(1, 1, 2, 1, "f16"))
    values = np.full((1, 1, 2), 1e6, np.float32)
    q = np.full((1, 1, 2), 1e-3, np.float32)
    run_attention(ops, pool, step_of([(0, 1)], [[0]]), (q, q, values), AttentionSpec(0, 1.0))
    assert np.isinf(pool.values[0, 0, 0]).all()


# ---- steps

GOOD = step_of([(15, 18), (0, 2)], [[0, 1], [2]])
LIMITS = Limits(max_tokens=8, max_seqs=2, max_rows=2, max_context=32)


def test_a_good_step_passes() -> None:
    check_step(GOOD, 3, LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.zeros(5, np.int64)}, "int32"),
        ({"positions": i32(15, 16, 18, 0, 1)}, "positions of sequence 0"),
        ({"positions": i32(15, 16, 17, 1, 2)}, "positions of sequence 1"),
        ({"cu_seqlens": i32(1, 3, 5)}, "starts at 0"),
        ({"cu_seqlens": i32(0, 3, 4)}, "ends at T"),
        ({"cu_seqlens": i32(0, 5, 5)}, "positions|no tokens"),
        ({"cu_seqlens": i32(0, 5)}, "S \\+ 1"),
        ({"context_lens": i32(18, 1)}, "too many"),
        ({"page_table": np.array([[0, 3], [2, -1]], np.int32)}, "out of range"),
        ({"page_table": np.array([[0, -1], [2, -1]], np.int32)}, "out of range"),
        ({"page_table": np.array([[1, 1], [2, -1]], np.int32)}, "pages of sequence 0"),
        ({"page_table": np.array([[0, 1], [1, -1]], np.int32)}, "writes a page"),
        ({"page_table": np.array([[0], [1]], np.int32)}, "pages of sequence 0"),
        ({"rows": i32(5)}, "row out of range"),
        ({"rows": i32(-1)}, "row out of range"),
        ({"rows": i32(0, 1, 2)}, "max_rows"),
    ],
)
def test_a_broken_step_is_caught(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_step(replace(GOOD, **changes), 3, LIMITS)


@pytest.mark.parametrize("limit", ["max_tokens", "max_seqs", "max_context"])
def test_limits_hold(limit: str) -> None:
    with pytest.raises(AssertionError, match=limit):
        check_step(GOOD, 3, replace(LIMITS, **{limit: 1}))


def test_sharing_a_full_page_for_reading_is_allowed() -> None:
    check_step(step_of([(16, 17), (16, 18)], [[0, 1], [0, 2]]), 3, LIMITS)


def test_pool_has_the_bytes_its_spec_says() -> None:
    spec = KVSpec(3, 2, 8, 5, "f16")
    pool = ReferenceOps().kv_pool(spec)
    assert pool.keys.nbytes + pool.values.nbytes == 5 * spec.bytes_per_page
    assert pool.keys.shape[2] == PAGE_SIZE


# ---- selection


def test_select_by_name() -> None:
    assert select("reference").name == "reference"
    with pytest.raises(InvalidRequest, match=r"'cuda'.*cpu, reference"):
        select("cuda")
