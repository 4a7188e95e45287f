"""The native CPU backend: C++ kernels, int8 activations against weights repacked into row panels.

The ops only record; `compile` traces a forward once, arranges it (recorder.py) and builds a native
program that replays it in one call per step, threads kept hot between ops. The only importer of the
native module. Layout and arithmetic: csrc/quant.h, csrc/gemm.inl. Linears with 16- or 32-bit float
weights use float activations; quantised ones quantise activations to int8 with a scale per 16.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backends.ops import (
    PAGE_SIZE,
    Activation,
    AttentionSpec,
    Batch,
    CompiledForward,
    Forward,
    KVSpec,
    Limits,
    Rope,
    StepArrays,
)
from headrace.backends.recorder import Node, Region, Traced, add_quantize, arrange, assign_slots
from headrace.errors import InvalidRequest, OutOfMemory, UnsupportedModel
from headrace.formats import blocks
from headrace.formats.mapped import forget
from headrace.types import StoredTensor

MAX_HEAD_DIM = 512  # twin of csrc/quant.h
MAX_THREADS = 256
LANES = 16

assert _native.PAGE_SIZE == PAGE_SIZE


@dataclass(frozen=True)
class CpuWeight:
    """A packed weight. **Shapes** `(out, in)` or `(n,)`."""

    native: _native.Weight
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        """Whether activations stay float for it."""
        return self.native.is_float

    @property
    def num_bytes(self) -> int:
        """Packed, as kernels read it."""
        return self.native.num_bytes


@dataclass(frozen=True)
class CpuKVPool:
    """Paged keys and values; written by running programs."""

    spec: KVSpec
    native: _native.KvPool


class CpuOps:
    """`Ops` that record. `isa` forces one of `_native.available_isas()` (default: the widest)."""

    name = "cpu"

    def __init__(self, num_threads: int = 0, isa: str = "") -> None:
        available = _available_cores()
        if not 0 <= num_threads <= MAX_THREADS:
            raise InvalidRequest(
                f"num_threads is {num_threads}; it must be 0 (one per core) to {MAX_THREADS}",
                param="num_threads",
            )
        if isa and isa not in _native.available_isas():
            raise InvalidRequest(
                f"isa {isa!r} is not available here; this CPU has {_native.available_isas()}",
                param="isa",
            )
        self.isa = isa or _native.available_isas()[0]
        self.num_threads = num_threads or min(available, MAX_THREADS)
        self._pool = _native.Pool(self.num_threads)
        self._nodes: list[Node] = []

    # ---- memory
    def weight(self, stored: StoredTensor) -> CpuWeight:
        """Repack into panels; vectors become float32."""
        if len(stored.shape) == 1:
            values = blocks.decode(stored.kind, stored.data, stored.shape)
            flat = np.ascontiguousarray(values).view(np.uint8)
            f32 = blocks.KINDS["F32"].type_id
            native = _native.make_weight(f32, [flat], [stored.shape[0]], 1, self._pool)
            return CpuWeight(native, stored.shape)
        return self.weight_rows((stored,))

    def weight_rows(self, parts: tuple[StoredTensor, ...]) -> CpuWeight:
        """Repack shards of one matrix."""
        kind, in_size = parts[0].kind, parts[0].shape[1]
        assert {(p.kind, p.shape[1]) for p in parts} == {(kind, in_size)}, "shards must agree"
        rows = [part.shape[0] for part in parts]
        native = _native.make_weight(
            blocks.KINDS[kind].type_id, [part.data for part in parts], rows, in_size, self._pool
        )
        for part in parts:
            forget(part.data)  # the packed copy is what is read from now on
        return CpuWeight(native, (sum(rows), in_size))

    def kv_pool(self, spec: KVSpec) -> CpuKVPool:
        """Zeroed pages, committed by the system as they are touched."""
        if spec.head_dim % LANES or spec.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModel(
                f"head_dim is {spec.head_dim}; the cpu backend takes multiples of {LANES} up to "
                f"{MAX_HEAD_DIM}: use backend='reference'"
            )
        is_f16 = spec.dtype == "f16"
        try:
            native = _native.KvPool(
                spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.num_pages, is_f16
            )
        except MemoryError:
            raise OutOfMemory(
                f"the system refuses {spec.num_pages * spec.bytes_per_page} bytes for the KV pool; "
                "give less with kv_cache_bytes"
            ) from None
        return CpuKVPool(spec, native)

    def compile(self, forward: Forward, kv: CpuKVPool, limits: Limits) -> CompiledForward:
        """Trace, arrange, build; the result replays."""
        self._nodes = []
        rows = Traced((), is_rows=True)
        output = forward(self, Batch(Traced(()), Traced(()), rows, None, kv))
        nodes, self._nodes = add_quantize(self._nodes), []
        program = _build(self._pool, self.isa, kv, limits, arrange(nodes), output)

        def run(step: StepArrays) -> NDArray[np.float32]:
            return program.run(
                step.token_ids,
                step.positions,
                step.cu_seqlens,
                step.context_lens,
                step.page_table,
                step.rows,
            )

        return run

    # ---- the machine's roof, for benchmarks
    def read_sum(self, weight: CpuWeight) -> int:
        """Read a packed weight with all threads and do nothing else; the sum of its 32-bit words,
        wrapped."""
        return _native.run_read_sum(self.isa, weight.native, self._pool)

    def peak(self, is_int8: bool, rounds: int) -> float:
        """Multiply and add in registers with all threads; how many operations that were."""
        return _native.run_peak(self.isa, is_int8, rounds, self._pool)

    # ---- compute: each op appends a node
    def _record(
        self,
        op: str,
        inputs: tuple[Traced, ...],
        out: Traced | None,
        weight: CpuWeight | None = None,
        **params: Any,
    ) -> Traced | None:
        bias = params.pop("bias", None)
        self._nodes.append(Node(op, inputs, out, weight, bias, params))
        return out

    def embedding(self, table: CpuWeight, token_ids: Traced) -> Traced:
        """Rows of the table, decoded exactly."""
        out = Traced((table.shape[1],), token_ids.is_rows)
        self._record("embedding", (), out, table)
        return out

    def linear(self, x: Traced, weight: CpuWeight, bias: CpuWeight | None = None) -> Traced:
        """x @ weight.T + bias."""
        assert x.width == weight.shape[1], (x.shape, weight.shape)
        out = Traced((weight.shape[0],), x.is_rows)
        self._record("linear", (x,), out, weight, bias=bias)
        return out

    def rms_norm(self, x: Traced, weight: CpuWeight | None, eps: float) -> Traced:
        """Over the last axis."""
        out = Traced(x.tail, x.is_rows)
        width = x.tail[-1]
        self._record("rms_norm", (x,), out, weight, width=width, count=x.width // width, value=eps)
        return out

    def rope(self, x: Traced, positions: Traced, rope: Rope) -> Traced:
        """Rotate; the table of a step is made once per distinct `rope`."""
        heads, head_dim = x.tail
        assert 2 * len(rope.inv_freq) <= head_dim, "rotary_dim exceeds head_dim"
        out = Traced(x.tail, x.is_rows)
        self._record("rope", (x,), out, rope=rope, width=head_dim, count=heads)
        return out

    def paged_attention(
        self, q: Traced, k: Traced, v: Traced, batch: Batch, spec: AttentionSpec
    ) -> Traced:
        """A write of k and v, then attention.

        Nothing orders a second write of a layer after the first attention, so there is none.
        """
        layers = {node.params["index"] for node in self._nodes if node.op == "kv_write"}
        assert spec.layer not in layers, f"layer {spec.layer} is written twice in one forward"
        written = Traced(())
        self._record("kv_write", (k, v), None, index=spec.layer, token=written)
        out = Traced((q.width,), q.is_rows)
        self._record("attend", (q, written), out, spec=spec, heads=q.tail[0])
        return out

    def glu(self, gate: Traced, up: Traced, activation: Activation) -> Traced:
        """activation(gate) * up."""
        if activation == "gelu":
            raise UnsupportedModel("the cpu backend has silu and gelu_tanh gates, not exact gelu")
        out = Traced(gate.tail, gate.is_rows)
        self._record(f"glu_{activation}", (gate, up), out, width=gate.width)
        return out

    def add(self, a: Traced, b: Traced) -> Traced:
        """a + b."""
        assert a.width == b.width, (a.shape, b.shape)
        out = Traced(a.tail, a.is_rows)
        self._record("add", (a, b), out, width=a.width)
        return out

    def scale(self, x: Traced, factor: float) -> Traced:
        """x * factor."""
        out = Traced(x.tail, x.is_rows)
        self._record("scale", (x,), out, width=x.width, value=factor)
        return out

    def softcap(self, x: Traced, cap: float) -> Traced:
        """cap * tanh(x / cap)."""
        out = Traced(x.tail, x.is_rows)
        self._record("softcap", (x,), out, width=x.width, value=cap)
        return out

    def take_rows(self, x: Traced, rows: Traced) -> Traced:
        """Rows asked for."""
        assert not x.is_rows, "rows are taken of tokens"
        out = Traced(x.tail, is_rows=True)
        self._record("take_rows", (x,), out, width=x.width)
        return out

    def reshape(self, x: Traced, *tail: int) -> Traced:
        """A view."""
        out = Traced(tail, x.is_rows, source=x)
        assert out.width == x.width, (x.shape, tail)
        return out


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: cores this process may use
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- building the native program


def _build(
    pool: _native.Pool,
    isa: str,
    kv: CpuKVPool,
    limits: Limits,
    regions: list[Region],
    output: Traced,
) -> _native.Program:
    tables = [n.weight for r in regions for n in r.nodes if n.op == "embedding"]
    assert tables, "a forward starts with an embedding"
    vocab = min(table.shape[0] for table in tables)
    program = _native.Program(
        pool, isa, kv.native, limits.max_tokens, limits.max_seqs, limits.max_rows, vocab
    )
    slots, geometry = assign_slots(regions, output)
    for tensor in geometry:
        if tensor.is_quantized:
            program.add_quantized_buffer(tensor.width, tensor.is_rows)
        else:
            program.add_buffer(tensor.width, tensor.is_rows)
    ropes: dict[Rope, int] = {}
    for region in regions:
        _add_region(program, region, slots, ropes)
    program.finish(slots[output.base], output.width)
    return program


def _add_region(
    program: _native.Program, region: Region, slots: dict[Traced, int], ropes: dict[Rope, int]
) -> None:
    if region.kind == "attend":
        return _add_attend(program, region.nodes[0], slots)
    if region.kind == "linears":
        program.begin_linears(region.is_rows)
        for node in region.nodes:
            assert node.out is not None
            bias = node.bias.native if node.bias is not None else None
            source, target = slots[node.inputs[0].base], slots[node.out.base]
            program.linear(source, target, node.weight.native, bias)
        return None
    program.begin_rows(region.is_rows)
    for node in region.nodes:
        _add_row_op(program, node, slots, ropes)
    return None


def _add_attend(program: _native.Program, node: Node, slots: dict[Traced, int]) -> None:
    spec: AttentionSpec = node.params["spec"]
    assert node.out is not None
    program.attend(
        slots[node.inputs[0].base],
        slots[node.out.base],
        spec.layer,
        node.params["heads"],
        spec.scale,
        spec.window,
        spec.softcap,
    )


def _add_row_op(
    program: _native.Program, node: Node, slots: dict[Traced, int], ropes: dict[Rope, int]
) -> None:
    inputs = [slots[x.base] for x in node.inputs]
    index = node.params.get("index", -1)
    if node.op == "rope":
        rope: Rope = node.params["rope"]
        if rope not in ropes:
            ropes[rope] = program.add_rope(list(rope.inv_freq), rope.interleaved, rope.factor)
        index = ropes[rope]
    width = node.inputs[0].width if node.op == "quantize" else node.params.get("width", 0)
    program.row_op(
        node.op,
        inputs[0] if inputs else -1,
        inputs[1] if len(inputs) > 1 else -1,
        slots[node.out.base] if node.out is not None else -1,
        node.weight.native if node.weight is not None else None,
        width,
        node.params.get("count", 1),
        node.params.get("value", 0.0),
        index,
    )
