"""Speed of each op and weight type as a model runs it: recorded programs, all threads, barriers.

A linear is a chain x -> [N, K] -> [K, N] -> ... over so many matrices that the last cache holds an
eighth, so weights come from memory at any number of tokens; quantising each input is included.
Attention goes over as many layers. Row-wise ops are the difference between a program with many of
them and one with few. Bytes are those of the packed weights, or of keys and values; an operation is
a multiplication or an addition. The share of the roof is the median of pairs: each sample and the
roof just before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import CpuKVPool, CpuOps, CpuWeight
from headrace.backends.ops import (
    PAGE_SIZE,
    AttentionSpec,
    Batch,
    Forward,
    KVSpec,
    Limits,
    Ops,
    Tensor,
)
from headrace.bench.filling import fill_pool, random_table, sequence_step
from headrace.bench.machine import (
    Machine,
    Probe,
    Roof,
    RoofSettings,
    describe_machine,
    last_cache_bytes,
    machine_tables,
)
from headrace.bench.measuring import (
    Progress,
    Spread,
    Table,
    calls_in,
    paired_seconds,
    per_second,
    sample,
    spread,
)
from headrace.errors import InvalidRequest
from headrace.formats import blocks
from headrace.types import StoredTensor

STRIP_ROWS = 16  # encoded once, stacked to a matrix: values do not matter, encoding is slow
TIMES_CACHE = 8  # at 3 the cache still serves a fifth
NUM_ROW_OPS = 17
ROW_TOKENS = 16  # of row-wise ops: two chunks of a region, rows stay in the cache
SMALL_KIND = "Q8_0"


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`num_seqs` sequences of `num_tokens` new tokens, each after `depth` others."""

    num_seqs: int
    num_tokens: int
    depth: int


ATTENTION = (
    AttentionCase(1, 1, 512),
    AttentionCase(1, 1, 2048),
    AttentionCase(1, 1, 8000),
    AttentionCase(16, 1, 2048),
    AttentionCase(1, 4, 2048),
    AttentionCase(1, 512, 0),
    AttentionCase(1, 512, 2048),
)


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """What to run. `rows` and `columns` are N and K of a linear; heads are SmolLM2's by default.
    `stream_bytes` None: eight times the last cache."""

    types: tuple[str, ...] = tuple(blocks.KINDS)
    tokens: tuple[int, ...] = (1, 4, 8, 64)
    rows: int = 2048
    columns: int = 2048
    attention: tuple[AttentionCase, ...] = ATTENTION
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    isa: str = ""
    num_threads: int = 0
    repeat: int = 5
    sample_s: float = 0.05
    stream_bytes: int | None = None
    roof: RoofSettings | None = None

    def check(self) -> None:
        """**Raises** `InvalidRequest`, `FormatError` before anything is measured."""
        for name in self.types:
            for size in (self.rows, self.columns):
                block = blocks.block_kind(name).block_elements
                if size < 1 or size % max(block, 32):
                    raise InvalidRequest(
                        f"a size is {size}; {name} needs multiples of {max(block, 32)}",
                        param="sizes",
                    )
        if not self.tokens or min(self.tokens) < 1:
            raise InvalidRequest(f"tokens are {self.tokens}; each at least 1", param="tokens")
        if self.repeat < 1:
            raise InvalidRequest(f"repeat is {self.repeat}; at least 1", param="repeat")


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One op: `bound` names the roof it comes closest to ("" for ops that work in the cache), and
    `fraction` how close its median comes."""

    op: str
    kind: str
    shape: str
    seconds: Spread
    gb_s: Spread
    gop_s: Spread
    bound: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class KernelReport:
    """All of it; JSON by `dataclasses.asdict`."""

    machine: Machine
    roof: Roof
    settings: KernelSettings
    results: tuple[KernelResult, ...]

    def tables(self) -> tuple[Table, ...]:
        """For people."""
        rows = tuple(_row(result) for result in self.results)
        heads = ("op", "type", "shape", "us", "GB/s", "GOP/s", "of roof")
        return (*machine_tables(self.machine, (self.roof,)), Table("kernels", heads, rows))


def bench_kernels(settings: KernelSettings, progress: Progress) -> KernelReport:
    """**Raises** `InvalidRequest`, `FormatError`; takes a second or two for each type."""
    settings.check()
    machine = describe_machine()
    progress("roof")
    ops = CpuOps(settings.num_threads, settings.isa)
    bench = _Bench(ops, settings, Probe(ops, settings.roof))
    results: list[KernelResult] = []
    for name, measure in _parts(bench):
        progress(name)
        results += measure()
    return KernelReport(machine, bench.probe.roof(), settings, tuple(results))


def _parts(bench: _Bench) -> Iterator[tuple[str, Callable[[], list[KernelResult]]]]:
    for kind in bench.settings.types:
        yield f"linear {kind}", lambda kind=kind: _linears(bench, kind)  # type: ignore[misc]
    for case in bench.settings.attention:
        name = f"attention at depth {case.depth}"
        yield name, lambda case=case: [_attention(bench, case)]  # type: ignore[misc]
    yield "row-wise ops", lambda: _row_ops(bench)


@dataclass(frozen=True)
class _Bench:
    ops: CpuOps
    settings: KernelSettings
    probe: Probe

    @property
    def stream_bytes(self) -> int:
        """More than any cache holds."""
        return self.settings.stream_bytes or TIMES_CACHE * last_cache_bytes()

    def measure(self, work: _Work, run: Callable[[], object], num_ops: int) -> KernelResult:
        """Of one of the `num_ops` ops that a call of `run` does."""
        run()
        count = calls_in(run, self.settings.sample_s)
        seconds, reading, computing = [], [], []
        for _ in range(self.settings.repeat):
            read_gb_s = self.probe.read_gb_s()
            peak_gop_s = self.probe.peak_gop_s(work.is_int8)
            seconds.append(sample(run, count) / num_ops)
            reading.append(work.num_bytes / 1e9 / seconds[-1] / read_gb_s)
            computing.append(work.num_ops / 1e9 / seconds[-1] / peak_gop_s)
        read, compute = statistics.median(reading), statistics.median(computing)
        bound = "read" if read >= compute else "int8" if work.is_int8 else "fp32"
        return _result(work, seconds, bound, max(read, compute))

    def compiled(
        self, forward: Forward, kv: CpuKVPool, case: AttentionCase
    ) -> Callable[[], object]:
        """Runs a forward on each sequence's own pages."""
        pages = -(-(case.depth + case.num_tokens) // PAGE_SIZE)
        page_table = np.arange(case.num_seqs * pages, dtype=np.int32).reshape(-1, pages)
        step = sequence_step(page_table, case.num_tokens, case.depth)
        total = len(step.token_ids)
        limits = Limits(total, case.num_seqs, total, case.depth + case.num_tokens)
        run = self.ops.compile(forward, kv, limits)
        return lambda: run(step)

    def no_kv(self) -> CpuKVPool:
        """For forwards that do not attend; big enough for the tokens of a step."""
        tokens = max(*self.settings.tokens, ROW_TOKENS)
        return self.ops.kv_pool(KVSpec(1, 1, 16, -(-tokens // PAGE_SIZE)))


# ---- linears


@dataclass(frozen=True)
class _Chain:
    table: CpuWeight
    weights: tuple[CpuWeight, ...]

    def __call__(self, ops: Ops, batch: Batch) -> Tensor:
        x = ops.take_rows(ops.embedding(self.table, batch.token_ids), batch.rows)
        for weight in self.weights:
            x = ops.linear(x, weight)
        return x


def _linears(bench: _Bench, kind: str) -> list[KernelResult]:
    settings = bench.settings
    weights = _matrices(bench, kind)
    most = max(settings.tokens)
    forward = _Chain(random_table(bench.ops, most, settings.columns), weights)
    kv = bench.no_kv()
    results = []
    for tokens in settings.tokens:
        run = bench.compiled(forward, kv, AttentionCase(1, tokens, 0))
        shape = f"{settings.rows} x {settings.columns}, {tokens} tok"
        num_bytes = sum(weight.num_bytes for weight in weights) / len(weights)
        num_ops = 2.0 * tokens * settings.rows * settings.columns
        work = _Work("linear", kind, shape, num_bytes, num_ops, not weights[0].is_float)
        results.append(bench.measure(work, run, len(weights)))
    return results


def _matrices(bench: _Bench, kind: str) -> tuple[CpuWeight, ...]:
    """[N, K] and [K, N] in turn."""
    settings = bench.settings
    made: list[CpuWeight] = []
    total = 0
    shapes = ((settings.rows, settings.columns), (settings.columns, settings.rows))
    strips = [_strip(kind, columns) for _, columns in shapes]
    while total < bench.stream_bytes or len(made) % 2:
        rows, columns = shapes[len(made) % 2]
        strip = strips[len(made) % 2].reshape(STRIP_ROWS, -1)
        data = strip[np.arange(rows) % STRIP_ROWS].reshape(-1)
        made.append(bench.ops.weight(StoredTensor("w", kind, (rows, columns), data)))
        total += made[-1].num_bytes
    return tuple(made)


def _strip(kind: str, columns: int) -> NDArray[np.uint8]:
    """Stored bytes of 16 rows that keep the size of what they multiply."""
    values = np.random.default_rng(columns).standard_normal((STRIP_ROWS, columns), np.float32)
    return blocks.encode(kind, values / np.float32(columns**0.5))


# ---- attention


@dataclass(frozen=True)
class _Attend:
    queries: CpuWeight
    keys: CpuWeight
    kv: CpuKVPool

    def __call__(self, ops: Ops, batch: Batch) -> Tensor:
        spec = self.kv.spec
        q = ops.embedding(self.queries, batch.token_ids)
        q = ops.reshape(q, q.shape[1] // spec.head_dim, spec.head_dim)
        k = ops.embedding(self.keys, batch.token_ids)
        k = ops.reshape(k, spec.num_kv_heads, spec.head_dim)
        scale = spec.head_dim**-0.5
        for layer in range(spec.num_layers):
            out = ops.paged_attention(q, k, k, batch, AttentionSpec(layer, scale))
        return ops.take_rows(out, batch.rows)


def _attention(bench: _Bench, case: AttentionCase) -> KernelResult:
    settings, ops = bench.settings, bench.ops
    pages = case.num_seqs * -(-(case.depth + case.num_tokens) // PAGE_SIZE)
    one = KVSpec(1, settings.num_kv_heads, settings.head_dim, pages)
    layers = max(2, -(-bench.stream_bytes // (one.bytes_per_page * pages)))
    kv = ops.kv_pool(KVSpec(layers, settings.num_kv_heads, settings.head_dim, pages))
    fill_pool(ops, kv)
    total = case.num_seqs * case.num_tokens
    q_size = settings.num_heads * settings.head_dim
    kv_size = settings.num_kv_heads * settings.head_dim
    forward = _Attend(random_table(ops, total, q_size), random_table(ops, total, kv_size, 1), kv)
    keys = case.num_seqs * (case.depth + case.num_tokens)
    pairs = case.num_seqs * case.num_tokens * (case.depth + (case.num_tokens + 1) / 2)
    shape = f"{settings.num_heads}/{settings.num_kv_heads} heads of {settings.head_dim}, "
    shape += f"{case.num_seqs} seq x {case.num_tokens} tok at {case.depth}"
    work = _Work("attention", "f16 KV", shape, 4.0 * keys * kv_size, 4.0 * pairs * q_size, False)
    return bench.measure(work, bench.compiled(forward, kv, case), layers)


# ---- row-wise ops


@dataclass(frozen=True)
class _Norms:
    """`num_norms` in a chain. Always as many small quantised linears: each reads its own norm, or
    (not `is_quantizing`) all read the first tensor."""

    table: CpuWeight
    gain: CpuWeight
    small: CpuWeight
    num_norms: int
    is_quantizing: bool

    def __call__(self, ops: Ops, batch: Batch) -> Tensor:
        x = ops.take_rows(ops.embedding(self.table, batch.token_ids), batch.rows)
        chain = [x]
        for _ in range(self.num_norms):
            chain.append(ops.rms_norm(chain[-1], self.gain, 1e-5))
        inputs = chain[1:] if self.is_quantizing else [x] * NUM_ROW_OPS
        return [ops.linear(tensor, self.small) for tensor in inputs][-1]


def _row_ops(bench: _Bench) -> list[KernelResult]:
    """In the cache: no roof of the machine's memory applies."""
    programs = [
        _norm_program(bench, 0, False),
        _norm_program(bench, NUM_ROW_OPS, False),
        _norm_program(bench, NUM_ROW_OPS, True),
    ]
    samples = paired_seconds(programs, bench.settings.repeat, bench.settings.sample_s)
    norms = _differences([(few, many) for few, many, _ in samples], NUM_ROW_OPS)
    quantized = _differences([(one, many) for _, one, many in samples], NUM_ROW_OPS - 1)
    shape = f"{ROW_TOKENS} tok x {bench.settings.columns}"
    elements = float(ROW_TOKENS * bench.settings.columns)
    return [
        _result(_Work("rms_norm", "f32", shape, 8 * elements, 4 * elements, False), norms),
        _result(_Work("quantise", "int8", shape, 5 * elements, 4 * elements, False), quantized),
    ]


def _differences(samples: list[tuple[float, float]], count: int) -> list[float]:
    """Of one op of `count`. A disturbed sample may even be negative and is dropped; should all be,
    a nanosecond stands for what could not be measured."""
    each = [(many - few) / count for few, many in samples]
    return [s for s in each if s > 1e-9] or [1e-9]


def _norm_program(bench: _Bench, num_norms: int, is_quantizing: bool) -> Callable[[], object]:
    columns = bench.settings.columns
    gain = np.ones(columns, np.float32).view(np.uint8)
    small = StoredTensor("small", SMALL_KIND, (STRIP_ROWS, columns), _strip(SMALL_KIND, columns))
    forward = _Norms(
        random_table(bench.ops, ROW_TOKENS, columns),
        bench.ops.weight(StoredTensor("gain", "F32", (columns,), gain)),
        bench.ops.weight(small),
        num_norms,
        is_quantizing,
    )
    return bench.compiled(forward, bench.no_kv(), AttentionCase(1, ROW_TOKENS, 0))


# ---- results


@dataclass(frozen=True, slots=True)
class _Work:
    """What one op moves and computes."""

    op: str
    kind: str
    shape: str
    num_bytes: float
    num_ops: float
    is_int8: bool


def _result(
    work: _Work, seconds: list[float], bound: str = "", fraction: float | None = None
) -> KernelResult:
    gb_s = per_second(work.num_bytes / 1e9, seconds)
    gop_s = per_second(work.num_ops / 1e9, seconds)
    each = spread(seconds)
    return KernelResult(work.op, work.kind, work.shape, each, gb_s, gop_s, bound, fraction)


def _row(result: KernelResult) -> tuple[str, ...]:
    share = "in cache" if result.fraction is None else f"{result.fraction:.0%} {result.bound}"
    return (
        result.op,
        result.kind,
        result.shape,
        f"{1e6 * result.seconds.median:.4g}",
        str(result.gb_s),
        str(result.gop_s),
        share,
    )
