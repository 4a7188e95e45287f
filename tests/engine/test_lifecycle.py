"""Sizing the KV pool: numbers in, numbers out; the machine is a folder of small files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.backends.ops import PAGE_SIZE
from headrace.config import EngineConfig
from headrace.engine.lifecycle import MemoryReport, available_memory, check_config, plan_memory
from headrace.errors import InvalidRequest, OutOfMemory

MIB = 1 << 20
CONFIG = EngineConfig(max_running=4)


def plan(config: EngineConfig = CONFIG, context: int = 2048, available: int = 1000) -> MemoryReport:
    """Pages of 1 MiB; `available` in MiB."""
    return plan_memory(
        config,
        page_bytes=MIB,
        weight_bytes=90 * MIB,
        model_context=context,
        available_bytes=available * MIB,
    )


def test_the_smallest_of_three_limits_holds() -> None:
    report = plan()  # 40% of 1000 MiB
    assert (report.num_pages, report.max_context) == (400, 2048)
    assert report.limited_by == "40% of 1000 MiB available"
    report = plan(available=10_000)  # four sequences of 128 pages
    assert (report.num_pages, report.limited_by) == (512, "4 sequences of 2048 tokens")
    report = plan(replace(CONFIG, kv_cache_max_bytes=100 * MIB))
    assert (report.num_pages, report.limited_by) == (100, "kv_cache_max_bytes")
    report = plan(replace(CONFIG, kv_cache_bytes=77 * MIB + 5))
    assert (report.num_pages, report.limited_by) == (77, "kv_cache_bytes")


def test_the_context_is_what_model_config_and_pool_allow() -> None:
    assert plan(replace(CONFIG, max_context=700)).max_context == 700
    report = plan(available=200)
    assert (report.num_pages, report.max_context) == (80, 80 * PAGE_SIZE)
    assert "less than the model's 2048" in str(report)
    assert "less than" not in str(plan())


def test_the_report_adds_up() -> None:
    text = str(plan())
    assert "weights         90.0 MiB" in text
    assert "400.0 MiB = 400 pages of 16 tokens x 1024.0 KiB" in text
    assert "together       490.0 MiB" in text


def test_the_smallest_useful_context_is_taken_from_all_that_is_left() -> None:
    report = plan(available=40)  # 40% would be 16 pages; 512 tokens need 32
    assert (report.num_pages, report.max_context) == (32, 512)
    assert report.limited_by == "the smallest useful context"
    assert plan(context=100, available=10).num_pages == 7  # a small model needs less


def test_too_little_memory_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemory, match=r"needs 32 pages x 1048576 bytes = 32\.0 MiB .* 31\.0"):
        plan(available=31)
    with pytest.raises(OutOfMemory, match=r"gets 31 pages \(31\.0 MiB\)"):
        plan(replace(CONFIG, kv_cache_bytes=31 * MIB))
    with pytest.raises(OutOfMemory, match=r"needs 2000 pages"):
        plan(replace(CONFIG, kv_cache_bytes=2000 * MIB))


@pytest.mark.parametrize(
    "change",
    [
        {"max_running": 0},
        {"max_waiting": 0},
        {"step_tokens": 0},
        {"num_threads": -1},
        {"max_context": 1},
        {"kv_cache_bytes": 0},
        {"kv_cache_max_bytes": 0},
        {"kv_memory_fraction": 0.0},
        {"kv_memory_fraction": 1.5},
        {"kv_memory_fraction": float("nan")},
        {"kv_memory_fraction": "0.5"},
        {"max_running": 10**7},
        {"step_tokens": 10**7},
        {"num_threads": "2"},
        {"num_threads": 1.5},
        {"max_context": 2.5},
        {"kv_cache_bytes": 1e8},
        {"kv_dtype": "int8"},
        {"backend": None},
        {"prefix_cache": "no"},
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, object]) -> None:
    (name,) = change
    with pytest.raises(InvalidRequest, match=name):
        check_config(replace(CONFIG, **change))  # type: ignore[arg-type]


# ---- the machine


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemFree: 1 kB\nMemAvailable: 4096 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_without_cgroups(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, {})) == 4 * MIB


@pytest.mark.parametrize("folder", ["", "box/", "box/inner/"])
def test_a_version_2_limit_anywhere_above_counts(tmp_path: Path, folder: str) -> None:
    files = {
        "proc/self/cgroup": "0::/box/inner\n",
        f"sys/fs/cgroup/{folder}memory.max": f"{3 * MIB}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{2 * MIB}\n",
        f"sys/fs/cgroup/{folder}memory.stat": f"anon 5\ninactive_file {MIB // 2}\n",
    }
    assert available_memory(machine(tmp_path, files)) == MIB + MIB // 2


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "99999999\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    assert available_memory(machine(tmp_path, files)) == 4 * MIB


def test_a_version_1_limit_counts_and_never_goes_below_zero(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{MIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * MIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 0\n",
    }
    assert available_memory(machine(tmp_path, files)) == 0


def test_this_machine_has_memory() -> None:
    assert available_memory() > MIB
