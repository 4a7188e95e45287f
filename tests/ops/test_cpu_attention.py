"""Native paged attention: the values of `ReferenceOps`, and bits that no neighbour can change.

csrc/attention.inl works in tiles of 64 and splits of 512 keys, in pages of 16; here
contexts and windows lie across all their borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from forwards import Span, attention_of, compiled, in_chunks, pages_for, step_of
from kernel_cases import ISAS, Array, generator, normal, same_bits

from headrace.backends.cpu import CpuOps
from headrace.backends.ops import AttentionSpec, CompiledForward, KVSpec, Ops
from headrace.backends.reference import ReferenceOps
from headrace.errors import OutOfMemory

Qkv = tuple[Array, Array, Array]

NATIVE = {isa: CpuOps(2, isa) for isa in ISAS}
FIRST = NATIVE[ISAS[0]]
POOLS = pytest.mark.parametrize("dtype", ["f16", "f32"])
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)

# Values have size 1 and their weights sum to 1: rounding of scores (about 4e-7 of up to 10) and of
# sums over up to a thousand keys.
ROUNDING = 1e-5


def tokens_of(seed: int, n: int, heads: int, kv_heads: int, head_dim: int) -> Qkv:
    q = normal(seed, n, heads, head_dim)
    return q, normal(seed + 1, n, kv_heads, head_dim), normal(seed + 2, n, kv_heads, head_dim)


def runner(
    ops: Ops,
    qkv: Qkv,
    spec: AttentionSpec,
    dtype: Literal["f16", "f32"] = "f16",
    num_pages: int | None = None,
) -> CompiledForward:
    """Attention of these tokens, on a fresh pool; takes steps of up to three sequences."""
    n, kv_heads, head_dim = qkv[1].shape
    pages = num_pages or pages_for(n) + 1
    pool = KVSpec(spec.layer + 1, kv_heads, head_dim, pages, dtype)
    return compiled(ops, attention_of(*qkv, spec), pool, n, 3)


def shuffled_pages(seed: int, num_pages: int) -> list[int]:
    pages: list[int] = generator(seed).permutation(num_pages).tolist()
    return pages


def whole(n: int) -> Span:
    return Span(0, n, shuffled_pages(n, pages_for(n) + 1))


def check(
    qkv: Qkv, spec: AttentionSpec, dtype: Literal["f16", "f32"], isas: Sequence[str] = ISAS
) -> None:
    """One sequence from its start in one step."""
    step = step_of([whole(len(qkv[0]))])
    expected = runner(ReferenceOps(batch_invariant=False), qkv, spec, dtype)(step)
    outputs = [runner(NATIVE[isa], qkv, spec, dtype)(step).copy() for isa in isas]
    np.testing.assert_allclose(outputs[0], expected, atol=ROUNDING)
    assert all(same_bits(outputs[0], other) for other in outputs)


# ---- values


@POOLS
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_heads_and_groups(group: int, head_dim: int, dtype: Literal["f16", "f32"]) -> None:
    qkv = tokens_of(group, 37, 2 * group, 2, head_dim)
    check(qkv, AttentionSpec(1, head_dim**-0.5), dtype)


@POOLS
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("window", [0, 1, 2, 15, 16, 17, 64, 80, 200])
def test_windows_and_softcaps(
    window: int, softcap: float, head_dim: int, dtype: Literal["f16", "f32"]
) -> None:
    qkv = tokens_of(10, 150, 3, 1, head_dim)
    check(qkv, AttentionSpec(0, 0.4, window, softcap), dtype)


@pytest.mark.parametrize("window", [0, 70, 513])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1030])
def test_contexts_across_tiles_and_splits(n: int, window: int) -> None:
    check(tokens_of(20, n, 2, 1, 16), AttentionSpec(0, 0.4, window), "f16")


@EVERY_ISA
def test_scores_of_any_size_make_probabilities(isa: str) -> None:
    """Scores up to 1e5 and down to -1e5: the largest takes all, nothing overflows."""
    q, k, v = tokens_of(30, 600, 2, 1, 16)
    check((q * 100, k * 100, v), AttentionSpec(0, 1.0), "f32", [isa])


@EVERY_ISA
def test_a_lone_key_returns_its_value_as_the_pool_holds_it(isa: str) -> None:
    """The f16 pool rounds as IEEE says: ties, subnormals, overflow; the f32 pool keeps all bits."""
    exponents = np.arange(-149, 128, dtype=np.float64)
    mantissas = [1, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, 2 - 2**-12, 1.37]
    values = np.outer(mantissas, 2.0**exponents).astype(np.float32).reshape(-1)
    values = np.concatenate([values, [65504, 65519, 65520, 0, np.inf]]).astype(np.float32)
    values = np.concatenate([values, -values])
    values = np.pad(values, (0, -len(values) % 16))
    v = values.reshape(-1, 1, 16)
    zeros = np.zeros_like(v)
    for dtype in ("f16", "f32"):
        run = runner(NATIVE[isa], (zeros, zeros, v), AttentionSpec(0, 1.0), dtype)
        got = [run(step_of([Span(0, 1, [0], i)]))[0].copy() for i in range(len(v))]
        with np.errstate(over="ignore"):
            kept = v.astype(np.float16 if dtype == "f16" else np.float32).astype(np.float32)
        assert np.array_equal(np.stack(got), kept.reshape(-1, 16)), dtype


# ---- bits


@EVERY_ISA
@POOLS
@pytest.mark.parametrize("spec", [AttentionSpec(0, 0.3), AttentionSpec(0, 0.3, 70, 5.0)], ids=str)
def test_chunks_change_no_bit(spec: AttentionSpec, dtype: Literal["f16", "f32"], isa: str) -> None:
    n = 150
    qkv = tokens_of(40, n, 6, 2, 32)
    expected = runner(FIRST, qkv, spec, dtype)(step_of([whole(n)])).copy()
    for size in (1, 7, 64, 65, 149, n):
        run = runner(NATIVE[isa], qkv, spec, dtype)
        assert same_bits(in_chunks(run, whole(n), size), expected), size


@pytest.mark.parametrize("window", [0, 100, 600])
def test_chunks_change_no_bit_across_splits(window: int) -> None:
    n, spec = 1100, AttentionSpec(0, 0.3, window)
    qkv = tokens_of(50, n, 2, 1, 16)
    expected = runner(FIRST, qkv, spec)(step_of([whole(n)])).copy()
    for size in (1, 7, 500, 512, 513):
        assert same_bits(in_chunks(runner(FIRST, qkv, spec), whole(n), size), expected), size


@EVERY_ISA
def test_threads_change_no_bit(isa: str) -> None:
    n, spec = 200, AttentionSpec(0, 0.3)
    qkv = tokens_of(60, n, 6, 2, 32)
    outputs = [
        runner(CpuOps(threads, isa), qkv, spec)(step_of([whole(n)])).copy()
        for threads in (1, 2, 3, 5)
    ]
    assert all(same_bits(outputs[0], other) for other in outputs)


@EVERY_ISA
def test_sequences_of_a_step_keep_apart(isa: str) -> None:
    """Three sequences advance side by side, each at its own speed, on pages dealt at random."""
    n, spec = 700, AttentionSpec(0, 0.3, softcap=20.0)
    qkv = tokens_of(70, n, 4, 2, 16)
    lengths, first_ids, rng = (90, 560, 50), (0, 100, 650), generator(71)
    expected = [
        runner(FIRST, qkv, spec)(step_of([Span(0, length, range(pages_for(n)), first)])).copy()
        for length, first in zip(lengths, first_ids, strict=True)
    ]
    deck = shuffled_pages(72, 60)
    hands = [deck[:6], deck[6:42], deck[42:46]]
    run, done = runner(NATIVE[isa], qkv, spec, num_pages=60), [0, 0, 0]
    while done != list(lengths):
        spans, who = [], []
        for s in rng.permutation(3).tolist():
            size = min(int(rng.choice([0, 1, 1, 5, 64, 130])), lengths[s] - done[s])
            if size:
                spans.append(Span(done[s], done[s] + size, hands[s], first_ids[s]))
                who.append(s)
        if not spans:
            continue
        rows = run(step_of(spans)).copy()
        for s, span in zip(who, spans, strict=True):
            mine, rows = rows[: span.end - span.begin], rows[span.end - span.begin :]
            assert same_bits(mine, expected[s][span.begin : span.end])
            done[s] = span.end


@EVERY_ISA
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("spec", [AttentionSpec(0, 0.3), AttentionSpec(1, 0.3, 530)], ids=str)
def test_decoding_long_and_short_contexts_together_changes_no_bit(
    spec: AttentionSpec, threads: int, isa: str
) -> None:
    """One token each: keys are split among threads when sequences are few; contexts span 0 to 3
    splits."""
    n, spans = 1600, [Span(0, 1540, range(100)), Span(0, 20, range(100, 103), 1540)]
    qkv = tokens_of(110, n, 4, 1, 16)
    whole_rows = [
        runner(FIRST, qkv, spec, num_pages=103)(step_of([span]))[-20:].copy() for span in spans
    ]
    run = runner(CpuOps(threads, isa), qkv, spec, num_pages=103)
    run(step_of([Span(0, 1520, range(100))]))
    for i in range(20):
        tokens = [Span(s.end - 20 + i, s.end - 19 + i, s.pages, s.first_id) for s in spans]
        got = run(step_of(tokens))
        assert same_bits(got.copy(), np.stack([rows[i] for rows in whole_rows]))


@EVERY_ISA
@POOLS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", [AttentionSpec(0, 0.3), AttentionSpec(0, 0.3, 20, 5.0)], ids=str)
def test_what_a_page_held_before_cannot_be_seen(
    spec: AttentionSpec, bad: float, dtype: Literal["f16", "f32"], isa: str
) -> None:
    """Pages full of another sequence's NaN are dealt again: slots past the context stay unseen."""
    n, num_pages = 91, 7
    q, k, v = tokens_of(80, n + 1, 4, 2, 16)
    k[n], v[n] = bad, bad
    run = runner(NATIVE[isa], (q, k, v), spec, dtype, num_pages)
    for i in range(num_pages * 16):  # the last token's keys and values into every slot
        run(step_of([Span(i, i + 1, range(num_pages), n - i)]))
    expected = runner(FIRST, (q, k, v), spec, dtype, num_pages)(step_of([whole(n)]))
    assert same_bits(in_chunks(run, whole(n), 13), expected.copy())


# ---- broken numbers are loud, and reach no further than they must


@EVERY_ISA
@pytest.mark.parametrize("n", [40, 600])
def test_a_broken_query_reaches_only_its_own_row(isa: str, n: int) -> None:
    q, k, v = tokens_of(90, n, 4, 2, 16)
    spec, step = AttentionSpec(0, 0.3), step_of([whole(n)])
    healthy = runner(NATIVE[isa], (q, k, v), spec)(step).reshape(n, 4, 16).copy()
    broken = q.copy()
    broken[17, 2, 5] = np.nan
    got = runner(NATIVE[isa], (broken, k, v), spec)(step).reshape(n, 4, 16).copy()
    assert np.isnan(got[17, 2]).all()
    got[17, 2] = healthy[17, 2]
    assert same_bits(got, healthy)


@EVERY_ISA
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("is_key", [True, False])
def test_a_broken_key_reaches_whoever_sees_it(isa: str, window: int, is_key: bool) -> None:
    n, at = 150, 70
    q, k, v = tokens_of(100, n, 4, 2, 16)
    spec, step = AttentionSpec(0, 0.3, window), step_of([whole(n)])
    healthy = runner(NATIVE[isa], (q, k, v), spec)(step).reshape(n, 4, 16).copy()
    (k if is_key else v)[at, 1] = np.nan  # the second KV head: query heads 2 and 3
    got = runner(NATIVE[isa], (q, k, v), spec)(step).reshape(n, 4, 16).copy()
    end = at + window if window else n
    assert np.isnan(got[at:end, 2:]).all()
    got[at:end, 2:] = healthy[at:end, 2:]
    assert same_bits(got, healthy)


def test_a_pool_the_system_refuses_is_a_typed_error() -> None:
    huge = KVSpec(num_layers=64, num_kv_heads=64, head_dim=512, num_pages=2**31 - 1)
    with pytest.raises(OutOfMemory, match="kv_cache_bytes"):
        CpuOps(1).kv_pool(huge)
