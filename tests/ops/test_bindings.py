"""What the native module refuses: every argument out of range, of a wrong type or shape.

Each error names its argument, and the program still runs afterwards. Errors that a user can cause
are typed and come from `CpuOps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forwards import Span, attention_of, compiled, on_rows_of, step_of
from kernel_cases import Array, i32, native_vector, native_weight, normal, same_bits, stored

from headrace import _native
from headrace.backends.cpu import CpuOps
from headrace.backends.ops import (
    AttentionSpec,
    Batch,
    CompiledForward,
    KVSpec,
    Limits,
    Ops,
    StepArrays,
    Tensor,
)
from headrace.errors import InvalidRequest, UnsupportedModel

HUGE = 2**31 - 1


def refused(argument: str) -> pytest.RaisesExc[ValueError]:
    """The error is about this argument (or one of several, parted by `|`)."""
    return pytest.raises(ValueError, match=rf"^({argument}):")


NUM_IDS, NUM_PAGES = 6, 4


# ---- a step

GOOD = step_of([Span(15, 18, [3, 0]), Span(0, 2, [1])])


@pytest.fixture(scope="module")
def program() -> CompiledForward:
    """Attention over up to eight tokens, two sequences, six token ids, four pages."""
    q, kv = normal(1, NUM_IDS, 2, 16), normal(2, NUM_IDS, 1, 16)
    forward = attention_of(q, kv, kv, AttentionSpec(0, 1.0))
    ops = CpuOps(2)
    limits = Limits(max_tokens=8, max_seqs=2, max_rows=5, max_context=64)
    return ops.compile(forward(ops), ops.kv_pool(KVSpec(1, 1, 16, NUM_PAGES)), limits)


def good_step() -> StepArrays:
    return replace(GOOD, token_ids=i32(0, 1, 2, 3, 5))


def table(*rows: list[int]) -> Any:
    return np.array(rows, np.int32)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"token_ids": i32(0, 1, 2, 3, 6)}, "token_ids"),
        ({"token_ids": i32(0, 1, -1, 3, 5)}, "token_ids"),
        ({"token_ids": i32(0, 1, 2, HUGE, 5)}, "token_ids"),
        ({"token_ids": i32(0, 1, 2, 3)}, "positions"),
        ({"token_ids": i32(), "positions": i32(), "cu_seqlens": i32(0, 0, 0)}, "token_ids"),
        ({"positions": i32(15, 16, 17, 0)}, "positions"),
        ({"positions": i32(15, 16, 18, 0, 1)}, "positions"),
        ({"positions": i32(15, 16, 17, 1, 2)}, "positions"),
        ({"positions": i32(15, 16, 17, 0, HUGE)}, "positions"),
        ({"positions": i32(-1, 16, 17, 0, 1)}, "positions"),
        ({"cu_seqlens": i32(0, 3)}, "cu_seqlens"),
        ({"cu_seqlens": i32(1, 3, 5)}, "cu_seqlens"),
        ({"cu_seqlens": i32(0, 3, 4)}, "cu_seqlens"),
        ({"cu_seqlens": i32(0, 0, 5)}, "cu_seqlens"),
        ({"cu_seqlens": i32(0, 5, 5)}, "cu_seqlens|positions"),
        ({"cu_seqlens": i32(0, HUGE, 5)}, "cu_seqlens"),
        ({"cu_seqlens": i32(0, 1_000_000, 5), "context_lens": i32(1_000_000, 2)}, "cu_seqlens"),
        ({"cu_seqlens": i32(0, -HUGE, 5)}, "cu_seqlens"),
        ({"context_lens": i32(18, 1)}, "context_lens"),
        ({"context_lens": i32(18, 0)}, "context_lens"),
        ({"context_lens": i32(18, -HUGE)}, "context_lens"),
        ({"context_lens": i32(HUGE, 2)}, "page_table"),
        ({"context_lens": i32(33, 2)}, "page_table"),
        ({"context_lens": i32(19, 2)}, "positions"),
        ({"context_lens": i32(18, 2, 1), "cu_seqlens": i32(0, 3, 5, 5)}, "page_table"),
        ({"page_table": table([3, 4], [1, -1])}, "page_table"),
        ({"page_table": table([3, -1], [1, -1])}, "page_table"),
        ({"page_table": table([3, HUGE], [1, -1])}, "page_table"),
        ({"page_table": table([3], [1])}, "page_table"),
        ({"page_table": table([], [])}, "page_table"),
        ({"page_table": table([3, 0])}, "page_table"),
        ({"rows": i32(5)}, "rows"),
        ({"rows": i32(-1)}, "rows"),
        ({"rows": i32(0, 1, 2, 3, 4, 4)}, "rows"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_a_broken_step_is_refused(
    program: CompiledForward, changes: dict[str, Any], argument: str
) -> None:
    expected = program(good_step()).copy()
    with refused(argument):
        program(replace(good_step(), **changes))
    assert same_bits(program(good_step()).copy(), expected)


def test_too_many_tokens_or_sequences_are_refused(program: CompiledForward) -> None:
    with refused("token_ids"):
        program(step_of([Span(0, 9, [0], -3)]))
    with refused("context_lens"):
        program(step_of([Span(0, 1, [page]) for page in range(3)]))


NAMES = ("token_ids", "positions", "cu_seqlens", "context_lens", "page_table", "rows")


@pytest.mark.parametrize("name", NAMES)
def test_no_array_is_converted(program: CompiledForward, name: str) -> None:
    """A wrong type would be cut to 32 bits, a wrong layout copied each step: both are our bugs."""
    good = getattr(good_step(), name)
    apart = np.repeat(good, 2, axis=-1)[..., ::2]
    bad = (
        good.astype(np.int64),
        good.astype(np.float32),
        good.astype(np.uint32),
        apart,
        good[None],
    )
    for array in (*bad, good.tolist(), None):
        changes: dict[str, Any] = {name: array}
        with pytest.raises(TypeError, match=name):
            program(replace(good_step(), **changes))


# ---- weights and single kernels


def make(kind: int = 2, num_bytes: int = 36, rows: int = 2, k: int = 32) -> _native.Weight:
    data = np.zeros(num_bytes, np.uint8)
    return _native.make_weight(kind, [data], [rows], k, _native.Pool(1))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"kind": 99}, "kind"),
        ({"kind": -1}, "kind"),
        ({"k": 31}, "k"),
        ({"k": 0}, "k"),
        ({"k": -32}, "k"),
        ({"rows": 0}, "rows"),
        ({"rows": -1}, "rows"),
        ({"rows": HUGE}, "parts"),
        ({"rows": 3}, "parts"),
        ({"num_bytes": 35}, "parts"),
        ({"num_bytes": 0}, "parts"),
    ],
)
def test_a_broken_weight_is_refused(arguments: dict[str, int], name: str) -> None:
    assert make().shape == (2, 32)
    with refused(name):
        make(**arguments)


def test_weights_take_bytes_in_order() -> None:
    pool, data = _native.Pool(1), np.zeros(36, np.uint8)
    with refused("parts"):
        _native.make_weight(2, [], [], 32, pool)
    with refused("parts"):
        _native.make_weight(2, [data], [1, 1], 32, pool)
    others: list[Any] = [data.astype(np.int8), np.zeros(72, np.uint8)[::2], data[None]]
    for bad in others:
        with pytest.raises(TypeError, match="parts"):
            _native.make_weight(2, [bad], [2], 32, pool)


@pytest.mark.parametrize("row", [-1, 2, HUGE])
def test_rows_of_a_weight_are_checked(row: int) -> None:
    with refused("row"):
        make().row(row)


def test_single_kernels_check_their_arguments() -> None:
    weight, x = make(), normal(3, 2, 32)
    for isa in ("sse", "AVX2"):
        with refused("isa"):
            _native.run_linear(isa, weight, None, x)
    with refused("x"):
        _native.run_linear("scalar", weight, None, x[:, :31].copy())
    others: list[Any] = [x.astype(np.float64), x[0], x.T, x[:, ::2]]
    for bad in others:
        with pytest.raises(TypeError, match="x: ndarray"):
            _native.run_linear("scalar", weight, None, bad)
    for bias in (native_vector(normal(4, 1)), native_vector(normal(4, 3)), weight):
        with refused("bias"):
            _native.run_linear("scalar", weight, bias, x)
    assert _native.run_linear("scalar", weight, None, x[:0]).shape == (0, 2)
    with pytest.raises(TypeError, match="x: ndarray"):
        _native.run_exp("scalar", others[0][0])


@pytest.mark.parametrize("threads", [0, -1, 257, HUGE])
def test_pools_have_a_sane_size(threads: int) -> None:
    with refused("num_threads"):
        _native.Pool(threads)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((0, 1, 16, 1), "num_layers"),
        ((-1, 1, 16, 1), "num_layers"),
        ((1, 0, 16, 1), "num_kv_heads"),
        ((1, HUGE, 16, 1), "num_kv_heads"),
        ((1, 1, 0, 1), "head_dim"),
        ((1, 1, 8, 1), "head_dim"),
        ((1, 1, 528, 1), "head_dim"),
        ((1, 1, -16, 1), "head_dim"),
        ((1, 1, 16, 0), "num_pages"),
        ((1, 1, 16, -5), "num_pages"),
    ],
)
def test_kv_pools_have_a_sane_size(sizes: tuple[int, int, int, int], name: str) -> None:
    with refused(name):
        _native.KvPool(*sizes, True)


def test_a_pool_beyond_all_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        _native.KvPool(HUGE, 1 << 16, 512, HUGE, True)


# ---- recording


def recorder(
    max_tokens: int = 4, max_seqs: int = 1, max_rows: int = 2, vocab: int = 5
) -> _native.Program:
    """Buffers: 0 and 1 of 32 floats per token, 2 quantised, 3 per row, 4 of 64 per token."""
    kv = _native.KvPool(2, 2, 16, 1, False)
    program = _native.Program(_native.Pool(1), "", kv, max_tokens, max_seqs, max_rows, vocab)
    program.add_buffer(32, False)
    program.add_buffer(32, False)
    program.add_quantized_buffer(32, False)
    program.add_buffer(32, True)
    program.add_buffer(64, False)
    program.add_rope([1.0] * 8, False, 1.0)
    return program


@pytest.mark.parametrize("name", ["max_tokens", "max_seqs", "max_rows", "vocab"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_positive(name: str, value: int) -> None:
    with refused(name):
        recorder(**{name: value})


def test_buffers_have_a_width() -> None:
    for width in (0, -1):
        with refused("width"):
            recorder().add_buffer(width, False)
    for k in (0, -32, 31):
        with refused("k"):
            recorder().add_quantized_buffer(k, False)


# op, a, b, out, weight, width, count, index
RowOp = tuple[str, int, int, int, "_native.Weight | None", int, int, int]


def record(program: _native.Program, step: RowOp, is_rows: bool = False) -> None:
    op, a, b, out, weight, width, count, index = step
    program.begin_rows(is_rows)
    program.row_op(op, a, b, out, weight, width, count, 1.0, index)


GAIN = normal(5, 32)
EMBED = normal(6, 5, 32)

GOOD_OPS: dict[str, Callable[[], RowOp]] = {
    "embedding": lambda: ("embedding", -1, -1, 0, native_weight(stored(EMBED)), 0, 1, -1),
    "rms_norm": lambda: ("rms_norm", 0, -1, 1, native_vector(GAIN), 32, 1, -1),
    "rms_norm of heads": lambda: ("rms_norm", 0, -1, 1, None, 16, 2, -1),
    "rope": lambda: ("rope", 0, -1, 1, None, 16, 2, 0),
    "glu_silu": lambda: ("glu_silu", 0, 0, 1, None, 32, 1, -1),
    "add": lambda: ("add", 0, 1, 1, None, 32, 1, -1),
    "softcap": lambda: ("softcap", 0, -1, 1, None, 32, 1, -1),
    "quantize": lambda: ("quantize", 0, -1, 2, None, 32, 1, -1),
    "kv_write": lambda: ("kv_write", 0, 1, -1, None, 0, 1, 1),
}


@pytest.mark.parametrize("name", GOOD_OPS)
def test_good_ops_are_recorded(name: str) -> None:
    record(recorder(), GOOD_OPS[name]())
    record(recorder(), ("take_rows", 0, -1, 3, None, 32, 1, -1), is_rows=True)


@pytest.mark.parametrize("name", GOOD_OPS)
@pytest.mark.parametrize("buffer", [-2, 5, HUGE, 2, 3, 4])
def test_ops_take_no_buffer_that_does_not_fit(name: str, buffer: int) -> None:
    """No such buffer, a quantised one, one of the other rows, a wider one; in every place."""
    op, a, b, out, weight, width, count, index = GOOD_OPS[name]()
    for place, used in (("a", a), ("b", b), ("out", out)):
        if used < 0 or used == buffer:
            continue
        bad = {"a": a, "b": b, "out": out, place: buffer}
        with refused(place):
            step = (op, bad["a"], bad["b"], bad["out"], weight, width, count, index)
            record(recorder(), step)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (("frobnicate", 0, -1, 1, None, 32, 1, -1), "op"),
        (("embedding", -1, -1, 0, None, 0, 1, -1), "weight"),
        (("softcap", 0, -1, 1, None, 0, 1, -1), "width"),
        (("softcap", 0, -1, 1, None, -32, 1, -1), "width"),
        (("softcap", 0, -1, 1, None, 32, 0, -1), "count"),
        (("softcap", 0, -1, 1, None, HUGE, HUGE, -1), "count"),
        (("quantize", 0, -1, 2, None, 30, 1, -1), "width"),
        (("rope", 0, -1, 1, None, 16, 2, -1), "index"),
        (("rope", 0, -1, 1, None, 16, 2, 1), "index"),
        (("rope", 0, -1, 1, None, 8, 4, 0), "index"),
        (("kv_write", 0, 1, -1, None, 0, 1, 2), "layer"),
        (("kv_write", 0, 1, -1, None, 0, 1, -1), "layer"),
        (("take_rows", 0, -1, 3, None, 32, 1, -1), "op"),
    ],
    ids=str,
)
def test_ops_with_bad_numbers_are_refused(step: RowOp, name: str) -> None:
    with refused(name):
        record(recorder(), step)


def test_ops_of_tokens_do_not_run_on_rows() -> None:
    for name in ("embedding", "rope", "kv_write"):
        with refused("op"):
            record(recorder(), GOOD_OPS[name](), is_rows=True)


def test_weights_fit_their_ops() -> None:
    small = native_weight(stored(EMBED[:4]))
    with refused("weight"):
        record(recorder(), ("embedding", -1, -1, 0, small, 0, 1, -1))
    for gain in (native_vector(GAIN[:16]), native_weight(stored(EMBED))):
        with refused("weight"):
            record(recorder(), ("rms_norm", 0, -1, 1, gain, 32, 1, -1))


def test_ops_need_an_open_region() -> None:
    weight = native_weight(stored(normal(7, 64, 32)))
    with refused("op"):
        recorder().row_op("softcap", 0, -1, 1, None, 32, 1, 1.0, -1)
    with refused("op"):
        recorder().linear(0, 4, weight, None)
    program = recorder()
    program.begin_rows(False)
    with refused("op"):
        program.linear(0, 4, weight, None)


def linear(source: int, target: int, kind: str, bias: Array | None = None) -> None:
    program = recorder()
    program.begin_linears(False)
    weight = native_weight(stored(normal(7, 64, 32), kind))
    program.linear(source, target, weight, None if bias is None else native_vector(bias))


def test_linears_check_what_they_join() -> None:
    linear(0, 4, "F32", normal(8, 64))
    linear(2, 4, "Q4_0", normal(8, 64))
    for source, kind in ((2, "F32"), (0, "Q4_0"), (3, "F32"), (4, "F32"), (9, "Q4_0"), (-1, "F32")):
        with refused("input"):
            linear(source, 4, kind)
    for target in (0, 2, 3, 9, -1):
        with refused("out"):
            linear(0, target, "F32")
    for length in (63, 65):
        with refused("bias"):
            linear(0, 4, "F32", normal(8, length))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 1, 2, 2, 1.0, 0, 0.0), "layer"),
        ((0, 1, -1, 2, 1.0, 0, 0.0), "layer"),
        ((0, 1, 0, 0, 1.0, 0, 0.0), "num_heads"),
        ((0, 1, 0, 3, 1.0, 0, 0.0), "num_heads"),
        ((0, 1, 0, -2, 1.0, 0, 0.0), "num_heads"),
        ((0, 1, 0, HUGE - 1, 1.0, 0, 0.0), "num_heads"),
        ((0, 1, 0, 2, 1.0, -1, 0.0), "window"),
        ((4, 1, 0, 2, 1.0, 0, 0.0), "q"),
        ((0, 4, 0, 2, 1.0, 0, 0.0), "out"),
        ((0, 3, 0, 2, 1.0, 0, 0.0), "out"),
    ],
)
def test_attention_checks_its_arguments(arguments: Any, name: str) -> None:
    recorder().attend(0, 1, 1, 2, 1.0, 0, 0.0)
    with refused(name):
        recorder().attend(*arguments)


def test_programs_end_with_rows() -> None:
    recorder().finish(3, 32)
    for output, width in ((0, 32), (2, 32), (3, 31), (9, 32)):
        with refused("output"):
            recorder().finish(output, width)
    step = step_of([Span(0, 1, [0])])
    arrays = [getattr(step, name) for name in NAMES]
    with refused("run"):
        recorder().run(*arrays)


# ---- typed errors of CpuOps


@pytest.mark.parametrize("threads", [-1, 257])
def test_thread_counts_are_refused_by_name(threads: int) -> None:
    with pytest.raises(InvalidRequest, match=f"num_threads is {threads}") as caught:
        CpuOps(threads)
    assert caught.value.param == "num_threads"


def test_unknown_isas_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"'mmx'.*scalar") as caught:
        CpuOps(1, "mmx")
    assert caught.value.param == "isa"


@pytest.mark.parametrize("head_dim", [8, 40, 520, 528])
def test_head_dims_without_a_kernel_are_refused(head_dim: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"head_dim is {head_dim}"):
        CpuOps(1).kv_pool(KVSpec(1, 1, head_dim, 1))


def small(op: Callable[[Ops, Tensor, Batch], Tensor]) -> CompiledForward:
    return compiled(CpuOps(1), on_rows_of(normal(9, 4, 32), op), KVSpec(1, 1, 16, 1), 4, 1)


def test_exact_gelu_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="gelu_tanh"):
        small(lambda ops, x, batch: ops.glu(x, x, "gelu"))


def test_mistakes_of_a_model_are_caught_when_it_is_compiled() -> None:
    wide = stored(normal(10, 8, 64))

    def twice(ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        heads = ops.reshape(x, 2, 16)
        key, spec = ops.reshape(ops.linear(x, ops.weight(stored(normal(11, 16, 32)))), 1, 16), 0
        for _ in range(2):
            mixed = ops.paged_attention(heads, key, key, batch, AttentionSpec(spec, 1.0))
        return mixed

    with pytest.raises(AssertionError, match="written twice"):
        small(twice)
    with pytest.raises(AssertionError, match="rows are taken of tokens"):
        small(lambda ops, x, batch: ops.take_rows(x, batch.rows))
    with pytest.raises(AssertionError):
        small(lambda ops, x, batch: ops.linear(x, ops.weight(wide)))
    with pytest.raises(AssertionError):
        small(
            lambda ops, x, batch: ops.add(x, ops.linear(x, ops.weight(stored(normal(12, 8, 32)))))
        )
    with refused("weight"):
        small(lambda ops, x, batch: ops.rms_norm(x, ops.weight(stored(normal(13, 31))), 1e-5))
