"""Speed of the engine with a model: prefill, decode by batch and depth, verifying, starting.

The engine's own scheduler, runner and greedy sampling; no text, no HTTP; random prompts, never the
same twice, answers of exact length. *Depth* is the context that is there when decoding begins. Its
pages are really written, each stream's own, but by a program that fills them at memory speed
(filling.py), since attention takes as long whatever it reads; the streams then find them in the
prefix cache, so that all begin together. The samples of a decode figure are consecutive windows of
one answer. `verify` runs the model's forward with k tokens of one sequence at a time and all their
logits, over its time with one: what checking k - 1 drafted tokens costs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import CpuKVPool, CpuOps, CpuWeight
from headrace.backends.ops import (
    PAGE_SIZE,
    CompiledForward,
    Forward,
    KVSpec,
    Limits,
    StepArrays,
)
from headrace.backends.recorder import Traced
from headrace.bench import startup, timing
from headrace.bench.filling import compile_filler, fill_pool, sequence_step
from headrace.bench.loading import Opened, open_engine
from headrace.bench.machine import (
    Machine,
    Probe,
    Roof,
    RoofSettings,
    describe_machine,
    machine_tables,
)
from headrace.bench.measuring import Progress, Spread, Table, paired_seconds, spread
from headrace.config import EngineConfig
from headrace.engine.lifecycle import available_memory
from headrace.errors import InvalidRequest
from headrace.formats.checkpoint import open_checkpoint
from headrace.models import DecoderSpec, read_spec
from headrace.observe import monotonic_s

MEMORY_FRACTION = 0.6  # of what is available, for the largest KV pool
VERIFY = (1, 2, 4, 8)
LEAST_DEPTH = 16  # of verifying: a context of nothing has no drafts


@dataclass(frozen=True, slots=True)
class OfflineSettings:
    """What to run. **Units** tokens. `generate` tokens per stream are cut into `repeat` windows."""

    prompt: int = 512
    generate: int = 128
    batches: tuple[int, ...] = (1, 8, 16, 32)
    depths: tuple[int, ...] = (0, 2048, 8000)
    repeat: int = 5
    num_threads: int = 0
    num_starts: int = 5
    sample_s: float = 0.05
    roof: RoofSettings | None = None

    def check(self) -> None:
        """**Raises** `InvalidRequest`."""
        least = {"prompt": 1, "generate": 3, "repeat": 1, "num_threads": 0, "num_starts": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value < low:
                raise InvalidRequest(f"{name} is {value}; it must be at least {low}", param=name)
        if min(self.batches, default=1) < 1 or min(self.depths, default=0) < 0:
            raise InvalidRequest(
                f"batches are {self.batches} and depths {self.depths}; at least 1 and 0",
                param="batch",
            )


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt alone."""

    num_tokens: int
    tokens_s: Spread
    ttft_ms: Spread


@dataclass(frozen=True, slots=True)
class Decode:
    """`skipped` says why a cell has no figures. `read_gb_s` counts packed weights and the KV read;
    `of_roof` is its share of the read roof just before and after. `outside`: the share of a step
    that is not in native code."""

    batch: int
    depth: int
    tokens_s: Spread | None = None
    read_gb_s: float = 0.0
    of_roof: float = 0.0
    outside: float = 0.0
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Verify:
    """`cost` of `num_tokens` positions over one."""

    depth: int
    num_tokens: int
    milliseconds: Spread
    cost: Spread


@dataclass(frozen=True, slots=True)
class Startup:
    """Fresh processes; `command_s` of the command line, parts of a bare engine."""

    command_s: Spread
    parts_s: dict[str, Spread]
    peak_bytes: int
    peak_ratio: float


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """`packed` weights are what a token reads, `stored` what the file holds of the same tensors."""

    file: int
    stored: int
    packed: int
    kv_per_token: int


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """All of it; JSON by `dataclasses.asdict`."""

    machine: Machine
    roofs: tuple[Roof, ...]
    model: str
    settings: OfflineSettings
    bytes: ModelBytes
    prefill: Prefill
    decode: tuple[Decode, ...]
    verify: tuple[Verify, ...]
    startup: Startup | None

    def tables(self) -> tuple[Table, ...]:
        """For people."""
        return (
            *machine_tables(self.machine, self.roofs),
            _model_table(self),
            _prefill_table(self.prefill),
            _decode_table(self.decode),
            _verify_table(self.verify),
            *([_startup_table(self.startup)] if self.startup else []),
        )


def bench_offline(
    name: str, path: Path, settings: OfflineSettings, progress: Progress
) -> OfflineReport:
    """**Raises** `InvalidRequest`, and what loading the model raises."""
    settings.check()
    machine = describe_machine()
    spec = read_spec(open_checkpoint(path))
    needed = settings.prompt + settings.generate
    if needed > spec.context_length:
        raise InvalidRequest(
            f"prompt and generate make {needed} tokens; the context holds {spec.context_length}",
            param="prompt",
        )
    progress("starting fresh processes")
    started = _startup(path, settings)
    progress("roof")
    one_thread = Probe(CpuOps(1), settings.roof).roof()
    probe = Probe(CpuOps(settings.num_threads), settings.roof)
    plan = plan_cells(spec, settings, int(MEMORY_FRACTION * available_memory()))
    opened = open_engine(path, _config(settings, plan), CountingOps)
    try:
        prompts = timing.Prompts(spec.vocab_size, 1)
        bench = _Bench(opened, model_bytes(opened), settings, probe, prompts, progress)
        prefill = bench.prefill()
        decode = tuple(cell if cell.skipped else bench.decode(cell) for cell in plan.cells)
    finally:
        opened.engine.close()
    verify = tuple(v for depth in settings.depths for v in bench.verify(depth))
    roofs = (one_thread, probe.roof())
    return OfflineReport(
        machine, roofs, name, settings, bench.bytes, prefill, decode, verify, started
    )


# ---- what fits


@dataclass(frozen=True, slots=True)
class Cells:
    """Decode cells, those that cannot run marked so, and the KV pool for the others."""

    cells: tuple[Decode, ...]
    num_pages: int
    page_bytes: int
    max_context: int


def plan_cells(spec: DecoderSpec, settings: OfflineSettings, budget_bytes: int) -> Cells:
    """Pure."""
    one = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, 1)
    least = max(settings.prompt + 1, 512)
    cells, num_pages = [], -(-least // PAGE_SIZE)
    for depth in settings.depths:
        for batch in settings.batches:
            pages = batch * -(-(max(depth, 1) + settings.generate) // PAGE_SIZE)
            skipped = ""
            if max(depth, 1) + settings.generate > spec.context_length:
                skipped = f"the context holds {spec.context_length}"
            elif pages * one.bytes_per_page > budget_bytes:
                needed = pages * one.bytes_per_page / 1e9
                skipped = f"needs {needed:.1f} GB of KV, {budget_bytes / 1e9:.1f} GB may be used"
            else:
                num_pages = max(num_pages, pages)
            cells.append(Decode(batch, depth, skipped=skipped))
    return Cells(tuple(cells), num_pages, one.bytes_per_page, spec.context_length)


def _config(settings: OfflineSettings, plan: Cells) -> EngineConfig:
    return EngineConfig(
        num_threads=settings.num_threads,
        max_running=max(settings.batches, default=1),
        kv_cache_bytes=plan.num_pages * plan.page_bytes,
    )


# ---- a backend that counts


class CountingOps(CpuOps):
    """The native backend, and an account of what it does.

    `packed_bytes`: weights that one token reads. `calls`: (end, seconds) of each native step. While
    `is_filling`, a step with more than one token of a sequence fills its pages instead.
    """

    def __init__(self, num_threads: int = 0) -> None:
        super().__init__(num_threads)
        self.packed_bytes = 0
        self.calls: list[tuple[float, float]] = []
        self.is_filling = False

    def linear(self, x: Traced, weight: CpuWeight, bias: CpuWeight | None = None) -> Traced:
        """As any, counted."""
        self.packed_bytes += weight.num_bytes
        return super().linear(x, weight, bias)

    def compile(self, forward: Forward, kv: CpuKVPool, limits: Limits) -> CompiledForward:
        """A forward that is timed, or fills."""
        self.packed_bytes = 0
        run = super().compile(forward, kv, limits)
        fill = compile_filler(self, kv, limits)

        def step(arrays: StepArrays) -> NDArray[np.float32]:
            if self.is_filling and len(arrays.token_ids) > len(arrays.context_lens):
                fill(arrays)
                # One of the tokens is drawn, it does not matter which.
                return np.zeros((len(arrays.rows), vocab_size), np.float32)
            begin_s = monotonic_s()
            logits = run(arrays)
            end_s = monotonic_s()
            self.calls.append((end_s, end_s - begin_s))
            return logits

        vocab_size = run(_one_token()).shape[1]
        return step


def _one_token() -> StepArrays:
    return sequence_step(np.zeros((1, 1), np.int32), 1, 0)


def model_bytes(opened: Opened) -> ModelBytes:
    """Of an engine on `CountingOps`, before another forward is compiled on them."""
    assert isinstance(opened.ops, CountingOps)
    memory = opened.memory
    per_token = memory.page_bytes // PAGE_SIZE
    return ModelBytes(opened.file_bytes, memory.weight_bytes, opened.ops.packed_bytes, per_token)


# ---- measuring


@dataclass(frozen=True)
class _Bench:
    opened: Opened
    bytes: ModelBytes
    settings: OfflineSettings
    probe: Probe
    prompts: timing.Prompts
    progress: Progress

    @property
    def ops(self) -> CountingOps:
        assert isinstance(self.opened.ops, CountingOps)
        return self.opened.ops

    def run(self, prompts: list[tuple[int, ...]], num_output: int) -> list[timing.Trace]:
        """All at once."""
        requests = [
            timing.greedy(prompt, num_output, f"stream {i}") for i, prompt in enumerate(prompts)
        ]
        return timing.run(self.opened.engine, requests)

    def fill(self, prompts: list[tuple[int, ...]]) -> None:
        """Into the prefix cache."""
        self.ops.is_filling = True
        try:
            self.run(prompts, 1)
        finally:
            self.ops.is_filling = False

    def prefill(self) -> Prefill:
        """Prompts one after another; the first two warm up."""
        self.progress(f"prefill {self.settings.prompt}")
        count = self.settings.prompt
        turns = range(2 + self.settings.repeat)
        times = [self.run([self.prompts.make(count)], 1)[0].ttft_s for _ in turns][2:]
        rates, ttft = spread([count / s for s in times]), spread([1e3 * s for s in times])
        return Prefill(count, rates, ttft)

    def decode(self, cell: Decode) -> Decode:
        """One answer per stream, from filled pages on."""
        self.progress(f"decode, {cell.batch} streams at depth {cell.depth}")
        roof = [self.probe.read_gb_s() for _ in range(self.settings.repeat)]
        prompts = [self.prompts.make(max(cell.depth, 1)) for _ in range(cell.batch)]
        self.fill(prompts)
        traces = self.run(prompts, self.settings.generate)
        cached = min(trace.cached_tokens for trace in traces)
        assert cached >= cell.depth - PAGE_SIZE, f"{cached} of {cell.depth} tokens were filled"
        roof += [self.probe.read_gb_s() for _ in range(self.settings.repeat)]
        rates = spread(timing.window_rates(traces, self.settings.repeat))
        context = max(cell.depth, 1) + self.settings.generate / 2
        read = self.bytes.packed + cell.batch * self._kv_bytes(context)
        gb_s = rates.median / cell.batch * read / 1e9
        return replace(
            cell,
            tokens_s=rates,
            read_gb_s=gb_s,
            of_roof=gb_s / statistics.median(roof),
            outside=self._outside(traces),
        )

    def _kv_bytes(self, context: float) -> float:
        """Keys and values that one token of such a context reads."""
        spec = self.opened.model.spec
        keys = sum(min(layer.window or context, context) for layer in spec.layers)
        return keys * self.bytes.kv_per_token / spec.num_layers

    def _outside(self, traces: list[timing.Trace]) -> float:
        """By the median step, not the sum: what disturbs a few steps is nobody's cost."""
        begin_s, end_s = timing.full_batch_span(traces)
        calls = [call for call in self.ops.calls if begin_s <= call[0] <= end_s]
        steps = [b[0] - a[0] for a, b in pairwise(calls)]
        outside = [b[0] - b[1] - a[0] for a, b in pairwise(calls)]
        return statistics.median(outside) / statistics.median(steps) if steps else 0.0

    def verify(self, depth: int) -> list[Verify]:
        """Nothing where the context is too short."""
        model, ops, settings = self.opened.model, self.ops, self.settings
        depth = max(depth, LEAST_DEPTH)
        if depth + max(VERIFY) > model.spec.context_length:
            return []
        self.progress(f"verifying at depth {depth}")
        kv = ops.kv_pool(model.kv_spec(-(-(depth + max(VERIFY)) // PAGE_SIZE)))
        fill_pool(ops, kv)
        limits = Limits(max(VERIFY), 1, max(VERIFY), depth + max(VERIFY))
        run = CpuOps.compile(ops, model.forward, kv, limits)
        pages = np.arange(kv.spec.num_pages, dtype=np.int32)[None]
        programs = [_Step(run, sequence_step(pages, count, depth)) for count in VERIFY]
        samples = paired_seconds(programs, settings.repeat, settings.sample_s)
        return [
            Verify(
                depth,
                count,
                spread([1e3 * s[i] for s in samples]),
                spread([s[i] / s[0] for s in samples]),
            )
            for i, count in enumerate(VERIFY)
        ]


@dataclass(frozen=True)
class _Step:
    run: CompiledForward
    arrays: StepArrays

    def __call__(self) -> object:
        return self.run(self.arrays)


def _startup(path: Path, settings: OfflineSettings) -> Startup | None:
    if settings.num_starts == 0:
        return None
    threads = settings.num_threads
    counts = (settings.prompt, settings.generate, threads)
    startup.command_seconds(path, threads)  # warms the page cache
    commands = [startup.command_seconds(path, threads) for _ in range(settings.num_starts)]
    runs = [startup.measure(path, *counts) for _ in range(settings.num_starts)]
    names = ("process", "open", "tokenizer", "weights", "engine", "first_token")
    parts = {name: spread([getattr(run, name) for run in runs]) for name in names}
    peak = max(runs, key=lambda run: run.peak_bytes)
    return Startup(spread(commands), parts, peak.peak_bytes, peak.peak_ratio)


# ---- tables


def _model_table(report: OfflineReport) -> Table:
    found, read = report.bytes, report.roofs[-1].read_gb_s.median * 1e9
    rows = (
        ("model", report.model),
        ("file", f"{found.file / 1e6:.1f} MB"),
        ("weights in the file", _weight_bytes(found.stored, read)),
        ("weights a token reads", _weight_bytes(found.packed, read)),
        ("KV per token", f"{found.kv_per_token / 1e3:.1f} kB"),
    )
    return Table("model", ("", ""), rows)


def _weight_bytes(num_bytes: int, read: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB, {read / num_bytes:.0f} times a second at the read roof"


def _prefill_table(found: Prefill) -> Table:
    row = (str(found.num_tokens), str(found.tokens_s), str(found.ttft_ms))
    return Table("prefill, 1 stream", ("prompt", "tokens/s", "first token ms"), (row,))


def _decode_table(cells: tuple[Decode, ...]) -> Table:
    heads = ("depth", "streams", "tokens/s", "read GB/s", "of roof", "outside kernels")
    return Table("decode", heads, tuple(map(_decode_row, cells)))


def _decode_row(cell: Decode) -> tuple[str, ...]:
    if cell.tokens_s is None:
        return (str(cell.depth), str(cell.batch), f"skipped: {cell.skipped}", "", "", "")
    return (
        str(cell.depth),
        str(cell.batch),
        str(cell.tokens_s),
        f"{cell.read_gb_s:.1f}",
        f"{cell.of_roof:.0%}",
        f"{cell.outside:.1%}",
    )


def _verify_table(found: tuple[Verify, ...]) -> Table:
    rows = tuple((str(v.depth), str(v.num_tokens), str(v.milliseconds), str(v.cost)) for v in found)
    return Table("verifying k positions", ("depth", "k", "ms", "over k = 1"), rows)


def _startup_table(found: Startup) -> Table:
    rows = [("headrace run, to the first byte, s", str(found.command_s))]
    rows += [(f"engine alone: {name}, s", str(part)) for name, part in found.parts_s.items()]
    peak = f"{found.peak_bytes / 1e6:.1f} MB, {found.peak_ratio:.2f} x (file + KV pool)"
    rows.append(("peak memory", peak))
    return Table("starting", ("", ""), tuple(rows))
