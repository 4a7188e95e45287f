"""`bench_offline` on a model of two layers: what is run, counted and skipped, never how fast."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_model import CONTEXT, VOCAB, matrix_shapes

from headrace.backends.ops import PAGE_SIZE, Limits
from headrace.bench import timing
from headrace.bench.loading import Opened, open_engine
from headrace.bench.machine import RoofSettings
from headrace.bench.offline import (
    CountingOps,
    OfflineReport,
    OfflineSettings,
    bench_offline,
    model_bytes,
    plan_cells,
)
from headrace.bench.startup import command_seconds, measure
from headrace.config import EngineConfig
from headrace.errors import EngineFailure, InvalidRequest
from headrace.formats.checkpoint import open_checkpoint
from headrace.models import read_spec
from headrace.types import Event

KV_PER_TOKEN = 2 * 2 * 32 * 2  # layers, K and V, width, f16
TINY = OfflineSettings(
    prompt=20,
    generate=7,
    batches=(1, 3),
    depths=(0, 40, 250),
    repeat=3,
    num_threads=2,
    num_starts=0,
    sample_s=0.0,
    roof=RoofSettings(read_bytes=1, sample_s=0.0, repeat=1),
)


@pytest.fixture(scope="module")
def report(small_model: Path) -> OfflineReport:
    return bench_offline("small", small_model, TINY, lambda _: None)


def test_each_cell_is_measured_or_says_why_not(report: OfflineReport) -> None:
    assert [(c.depth, c.batch) for c in report.decode] == [
        (0, 1),
        (0, 3),
        (40, 1),
        (40, 3),
        (250, 1),
        (250, 3),
    ]
    for cell in report.decode[:4]:
        assert cell.tokens_s is not None
        assert cell.tokens_s.least > 0
        assert cell.of_roof > 0
        assert 0 < cell.outside < 1
        assert not cell.skipped
    for cell in report.decode[4:]:
        assert cell.tokens_s is None
        assert cell.skipped == f"the context holds {CONTEXT}"


def test_bytes_are_those_of_the_file_and_of_the_packed_matrices(
    report: OfflineReport, small_model: Path
) -> None:
    stored = sum(t.data.nbytes for t in open_checkpoint(small_model).tensors.values())
    assert report.bytes.file == small_model.stat().st_size
    assert report.bytes.stored == stored
    assert report.bytes.kv_per_token == KV_PER_TOKEN
    # Q8_0 stays 34 bytes for 32 weights; 16 rows are a panel, which fills whole lines of 64 bytes
    shapes = matrix_shapes().values()
    lines = sum(-(-rows // 16) * -(-16 * columns * 34 // 32 // 64) for rows, columns in shapes)
    assert report.bytes.packed == 64 * lines


def test_bytes_read_count_weights_once_and_each_streams_context(report: OfflineReport) -> None:
    for cell in report.decode[:4]:
        assert cell.tokens_s is not None
        context = max(cell.depth, 1) + TINY.generate / 2
        step = report.bytes.packed + cell.batch * context * KV_PER_TOKEN
        expected = cell.tokens_s.median / cell.batch * step / 1e9
        assert cell.read_gb_s == pytest.approx(expected)


def test_verifying_is_relative_to_one_position(report: OfflineReport) -> None:
    assert [(v.depth, v.num_tokens) for v in report.verify] == [
        (depth, k)
        for depth in (16, 40)
        for k in (1, 2, 4, 8)  # 250 + 8 exceed the context
    ]
    for found in report.verify:
        assert found.milliseconds.least > 0
        if found.num_tokens == 1:
            assert (found.cost.least, found.cost.greatest) == (1.0, 1.0)


def test_the_report_is_tables_and_json(report: OfflineReport) -> None:
    tables = {table.title: table for table in report.tables()}
    assert tables["decode"].rows[4][2] == f"skipped: the context holds {CONTEXT}"
    assert tables["prefill, 1 stream"].rows[0][0] == "20"
    assert [row[0] for row in tables["roof"].rows] == ["1", "2"]
    assert all(len(row) == len(t.heads) for t in tables.values() for row in t.rows)
    found = json.loads(json.dumps(asdict(report)))
    assert found["model"] == "small"
    assert found["startup"] is None


def test_cells_that_exceed_the_memory_are_skipped(small_model: Path) -> None:
    spec = read_spec(open_checkpoint(small_model))
    pages = -(-(40 + 7) // PAGE_SIZE)
    budget = 2 * pages * PAGE_SIZE * KV_PER_TOKEN
    plan = plan_cells(spec, replace(TINY, depths=(40,), batches=(1, 2, 3)), budget)
    assert [bool(cell.skipped) for cell in plan.cells] == [False, False, True]
    assert "GB" in plan.cells[2].skipped
    # the pool still holds the shortest context that an engine takes
    assert plan.num_pages == 512 // PAGE_SIZE


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": 0},
        {"generate": 2},
        {"repeat": 0},
        {"batches": (0,)},
        {"depths": (-1,)},
        {"prompt": CONTEXT},
    ],
)
def test_impossible_settings_are_refused(small_model: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(change)).rstrip("s")):
        bench_offline("small", small_model, replace(TINY, **change), lambda _: None)


# ---- filling


@pytest.fixture
def opened(small_model: Path) -> Opened:
    config = EngineConfig(num_threads=1, max_running=4, prefix_cache=False)
    return open_engine(small_model, config, CountingOps)


def test_filling_replaces_prefill_and_nothing_else(opened: Opened) -> None:
    ops = opened.ops
    assert isinstance(ops, CountingOps)
    prompt = timing.Prompts(VOCAB, 0).make(60)
    with opened.engine:
        ops.is_filling = True
        timing.run(opened.engine, [timing.greedy(prompt, 5, "filled")])
        assert len(ops.calls) == 4  # the first token comes of the filling
        ops.is_filling = False
        timing.run(opened.engine, [timing.greedy(prompt, 5, "real")])
        assert len(ops.calls) == 9
    ends = [end for end, _ in ops.calls]
    assert ends == sorted(ends)
    assert all(seconds > 0 for _, seconds in ops.calls)


def test_counting_changes_no_answer(small_model: Path, opened: Opened) -> None:
    config = EngineConfig(num_threads=1, max_running=4, prefix_cache=False)
    plain = open_engine(small_model, config)
    prompt = timing.Prompts(VOCAB, 0).make(30)
    answers = []
    for one in (plain, opened):
        with one.engine:
            tokens: list[int] = []
            request = timing.greedy(prompt, 12, "x")
            sink = _Collector(tokens)
            one.engine.submit(request, sink)
            timing.run(one.engine, [timing.greedy(prompt, 20, "longer")])  # ends after it
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(np.unique(answers[0])) > 1


class _Collector:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, event: Event) -> None:
        self._tokens += event.token_ids


def test_packed_bytes_do_not_add_up_over_forwards(opened: Opened) -> None:
    with opened.engine:
        before = model_bytes(opened).packed
        kv = opened.ops.kv_pool(opened.model.kv_spec(1))
        opened.ops.compile(opened.model.forward, kv, Limits(1, 1, 1, 16))
        assert model_bytes(opened).packed == before


# ---- fresh processes


def test_a_fresh_process_tells_its_times_and_memory(small_model: Path) -> None:
    found = measure(small_model, num_prompt=200, num_output=12, num_threads=1)
    assert found.kv_bytes == 224 * KV_PER_TOKEN  # whole pages
    assert found.file_bytes == small_model.stat().st_size
    assert found.peak_ratio == found.peak_bytes / (found.file_bytes + found.kv_bytes)
    parts = (found.process, found.open, found.tokenizer, found.weights, found.engine)
    assert min(parts) > 0
    assert found.first_token > 0


def test_the_command_line_answers(small_model: Path) -> None:
    assert command_seconds(small_model, num_threads=1) > 0


def test_a_process_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "not.gguf").write_bytes(b"nothing")
    with pytest.raises(EngineFailure, match=r"not.gguf.* ended with 1"):
        command_seconds(tmp_path / "not.gguf", num_threads=1)
    with pytest.raises(EngineFailure, match="ended with 1"):
        measure(tmp_path / "not.gguf", 1, 1, 1)


def test_a_request_that_fails_is_an_error(opened: Opened) -> None:
    with opened.engine:
        stopping = timing.greedy((1,), 9, "x")
        params = replace(stopping.params, stop_token_ids=tuple(range(VOCAB)))
        with pytest.raises(EngineFailure, match="ended by stop"):
            timing.run(opened.engine, [replace(stopping, params=params)])
