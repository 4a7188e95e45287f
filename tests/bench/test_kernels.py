"""`bench_kernels` on tiny sizes: what is run and counted, never how fast it was."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from headrace.bench.kernels import AttentionCase, KernelReport, KernelSettings, bench_kernels
from headrace.bench.machine import RoofSettings
from headrace.errors import FormatError, HeadraceError, InvalidRequest

TINY = KernelSettings(
    types=("Q4_1", "F16"),
    tokens=(1, 3),
    rows=64,
    columns=32,
    attention=(AttentionCase(2, 1, 40), AttentionCase(1, 5, 0)),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_threads=2,
    repeat=3,
    sample_s=0.0,
    stream_bytes=10_000,
    roof=RoofSettings(read_bytes=1, sample_s=0.0, repeat=1),
)


@pytest.fixture(scope="module")
def report() -> KernelReport:
    return bench_kernels(TINY, lambda _: None)


def test_every_type_token_count_and_op_is_there(report: KernelReport) -> None:
    assert [(r.op, r.kind, r.shape) for r in report.results] == [
        ("linear", "Q4_1", "64 x 32, 1 tok"),
        ("linear", "Q4_1", "64 x 32, 3 tok"),
        ("linear", "F16", "64 x 32, 1 tok"),
        ("linear", "F16", "64 x 32, 3 tok"),
        ("attention", "f16 KV", "4/2 heads of 16, 2 seq x 1 tok at 40"),
        ("attention", "f16 KV", "4/2 heads of 16, 1 seq x 5 tok at 0"),
        ("rms_norm", "f32", "16 tok x 32"),
        ("quantise", "int8", "16 tok x 32"),
    ]


def test_bytes_and_operations_are_those_of_the_work(report: KernelReport) -> None:
    """With an odd number of samples, the median rate is the work over the median time."""
    expected = [  # bytes, operations
        (64 * 32 * 20 / 32, 2 * 64 * 32),  # a block of Q4_1: 20 bytes for 32
        (64 * 32 * 20 / 32, 3 * 2 * 64 * 32),
        (64 * 32 * 2, 2 * 64 * 32),
        (64 * 32 * 2, 3 * 2 * 64 * 32),
        (2 * 41 * 2 * 2 * 16 * 2, 2 * 41 * 4 * 4 * 16),  # keys and values; q.k and p.v
        (5 * 2 * 2 * 16 * 2, (1 + 2 + 3 + 4 + 5) * 4 * 4 * 16),
    ]
    for result, (num_bytes, num_ops) in zip(report.results, expected, strict=False):
        assert result.gb_s.median * result.seconds.median * 1e9 == pytest.approx(num_bytes)
        assert result.gop_s.median * result.seconds.median * 1e9 == pytest.approx(num_ops)


def test_a_roof_is_named_where_one_applies(report: KernelReport) -> None:
    assert {r.bound for r in report.results[:2]} <= {"read", "int8"}
    assert {r.bound for r in report.results[2:6]} <= {"read", "fp32"}
    assert all(r.fraction is not None and r.fraction > 0 for r in report.results[:6])
    assert [r.fraction for r in report.results[6:]] == [None, None]


def test_the_report_is_tables_and_json(report: KernelReport) -> None:
    tables = {table.title: table for table in report.tables()}
    assert set(tables) == {"machine", "roof", "kernels"}
    assert len(tables["kernels"].rows) == len(report.results)
    assert all(len(row) == len(tables["kernels"].heads) for row in tables["kernels"].rows)
    found = json.loads(json.dumps(asdict(report)))
    assert found["settings"]["types"] == ["Q4_1", "F16"]
    assert found["roof"]["num_threads"] == 2


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (replace(TINY, types=("Q4_9",)), FormatError, "Q4_9.*Q4_1"),
        (replace(TINY, types=("Q4_K",)), InvalidRequest, "size is 64; Q4_K.*256"),
        (replace(TINY, columns=40), InvalidRequest, "size is 40; Q4_1.*32"),
        (replace(TINY, tokens=(1, 0)), InvalidRequest, "tokens"),
        (replace(TINY, tokens=()), InvalidRequest, "tokens"),
        (replace(TINY, repeat=0), InvalidRequest, "repeat"),
        (replace(TINY, isa="mmx"), InvalidRequest, "mmx"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    settings: KernelSettings, error: type[HeadraceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        bench_kernels(settings, lambda _: None)
