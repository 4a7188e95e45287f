"""What the machine tells of itself, from a folder of small files; and that the probe counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.backends.cpu import CpuOps
from headrace.bench.machine import (
    CACHE_IF_UNKNOWN,
    Probe,
    RoofSettings,
    describe_machine,
    last_cache_bytes,
    machine_tables,
)
from headrace.bench.startup import peak_bytes

TINY = RoofSettings(read_bytes=1, sample_s=0.0, repeat=2)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_machine_is_read_from_the_systems_files(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", "processor : 0\nmodel name\t: Mill 3000\nmodel name\t: x\n")
    for index, size in enumerate(("32K\n", "1024K\n", "48M\n")):
        write(tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}/size", size)
    found = describe_machine(tmp_path)
    assert found.cpu == "Mill 3000"
    assert found.cache_bytes == 48 << 20
    assert found.num_cpus >= 1
    assert found.date.endswith("UTC")


def test_without_these_files_something_is_said(tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path) == CACHE_IF_UNKNOWN
    assert describe_machine(tmp_path).cpu


def test_the_probe_keeps_its_samples() -> None:
    probe = Probe(CpuOps(2, "scalar"), TINY)
    before = probe.roof()
    assert (before.num_threads, before.isa) == (2, "scalar")
    samples = [probe.read_gb_s() for _ in range(5)]
    assert min(samples) > 0
    after = probe.roof().read_gb_s
    assert after.least == min(before.read_gb_s.least, *samples)
    assert after.greatest == max(before.read_gb_s.greatest, *samples)
    assert probe.peak_gop_s(is_int8=True) > 0
    assert probe.peak_gop_s(is_int8=False) > 0
    _, table = machine_tables(describe_machine(), (probe.roof(),))
    assert table.rows[0][:2] == ("2", "scalar")


def test_peak_memory_is_the_kernels_high_water_mark(tmp_path: Path) -> None:
    write(tmp_path / "status", "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\n")
    assert peak_bytes(tmp_path / "status") == 2 << 20
    assert peak_bytes(tmp_path / "absent") == 0


@pytest.mark.parametrize(("text", "expected"), [("512\n", 512), ("2G\n", 2 << 30)])
def test_cache_sizes_have_units(tmp_path: Path, text: str, expected: int) -> None:
    write(tmp_path / "sys/devices/system/cpu/cpu0/cache/index3/size", text)
    assert last_cache_bytes(tmp_path) == expected
