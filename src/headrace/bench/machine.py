"""What the machine is, and its roof: the fastest it can read memory, and multiply.

Generation cannot beat these: a token at batch 1 reads every weight once, a long prompt is all int8
multiplications. The loops are native (csrc/roof.inl), run by the backend's own threads over memory
laid out as weights are, and the roof is the best of several runs: what was disturbed is no roof.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace import __version__
from headrace.backends.cpu import CpuOps, CpuWeight
from headrace.bench.measuring import Table, calls_in, sample
from headrace.types import StoredTensor

CACHE_IF_UNKNOWN = 32 << 20
LEAST_READ_BYTES = 256 << 20
BLOCK_ROWS, BLOCK_COLUMNS = 1024, 4096  # 16 MiB of float32, read in repeatedly


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when a benchmark ran. `cache_bytes`: of the last level, all instances that the
    first CPU sees."""

    cpu: str
    num_cpus: int
    cache_bytes: int
    memory_bytes: int
    system: str
    python: str
    version: str
    date: str
    load_average: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Roof:
    """The best of several runs. An operation is a multiplication or an addition."""

    num_threads: int
    isa: str
    read_gb_s: float
    int8_gop_s: float
    fp32_gop_s: float


@dataclass(frozen=True, slots=True)
class RoofSettings:
    """How hard to look for the roof."""

    read_bytes: int = LEAST_READ_BYTES
    repeat: int = 7
    sample_s: float = 0.02


def describe_machine(root: Path = Path("/")) -> Machine:
    """From what the system tells; unknown parts are named so."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_name(root),
        num_cpus=available_cpus(),
        cache_bytes=last_cache_bytes(root),
        memory_bytes=pages,
        system=platform.platform(),
        python=platform.python_version(),
        version=__version__,
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        load_average=tuple(round(x, 1) for x in os.getloadavg()),
    )


def available_cpus() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_cache_bytes(root: Path = Path("/")) -> int:
    """Size of the largest cache the first CPU sees; `CACHE_IF_UNKNOWN` without Linux's sysfs."""
    sizes = [
        _size(path.read_text())
        for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size")
    ]
    return max(sizes, default=CACHE_IF_UNKNOWN)


def _size(text: str) -> int:
    digits = text.strip().rstrip("KMG")
    unit = text.strip()[len(digits) :]
    return int(digits) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]


def _cpu_name(root: Path) -> str:
    info = root / "proc/cpuinfo"
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---- roof


def measure_roof(num_threads: int, isa: str = "", settings: RoofSettings | None = None) -> Roof:
    """**Raises** `InvalidRequest` for threads or an ISA that there is not."""
    settings = settings or RoofSettings(max(LEAST_READ_BYTES, 4 * last_cache_bytes()))
    ops = CpuOps(num_threads, isa)
    weight = _memory(ops, settings.read_bytes)
    return Roof(
        num_threads=ops.num_threads,
        isa=ops.isa,
        read_gb_s=weight.num_bytes / 1e9 / _read_s(ops, weight, settings),
        int8_gop_s=_peak(ops, True, settings),
        fp32_gop_s=_peak(ops, False, settings),
    )


def _memory(ops: CpuOps, num_bytes: int) -> CpuWeight:
    """A packed float matrix of about `num_bytes`, every page written."""
    shape = (BLOCK_ROWS, BLOCK_COLUMNS)
    data = np.ones(shape, np.float32).view(np.uint8).reshape(-1)
    block = StoredTensor("roof", "F32", shape, data)
    return ops.weight_rows((block,) * max(1, num_bytes // data.nbytes))


def _read_s(ops: CpuOps, weight: CpuWeight, settings: RoofSettings) -> float:
    return min(sample(lambda: ops.read_sum(weight), 1) for _ in range(settings.repeat))


def _peak(ops: CpuOps, is_int8: bool, settings: RoofSettings) -> float:
    few = 10_000  # rounds of about 10 ns; one call warms up and tells how many fill a sample
    rounds = few * calls_in(lambda: ops.peak(is_int8, few), settings.sample_s)
    num_ops = ops.peak(is_int8, rounds)
    best_s = min(sample(lambda: ops.peak(is_int8, rounds), 1) for _ in range(settings.repeat))
    return num_ops / 1e9 / best_s


def machine_tables(machine: Machine, roofs: tuple[Roof, ...]) -> tuple[Table, ...]:
    """For people."""
    rows = (
        ("processor", f"{machine.cpu}, {machine.num_cpus} CPUs for this process"),
        ("last cache", f"{machine.cache_bytes / (1 << 20):.0f} MiB"),
        ("memory", f"{machine.memory_bytes / 1e9:.1f} GB"),
        ("system", f"{machine.system}, Python {machine.python}"),
        ("headrace", machine.version),
        ("date", machine.date),
        ("load average", " ".join(map(str, machine.load_average))),
    )
    roof_rows = tuple(
        (
            str(roof.num_threads),
            roof.isa,
            f"{roof.read_gb_s:.1f}",
            f"{roof.int8_gop_s:.0f}",
            f"{roof.fp32_gop_s:.0f}",
        )
        for roof in roofs
    )
    heads = ("threads", "ISA", "read GB/s", "int8 GOP/s", "fp32 GOP/s")
    return Table("machine", ("", ""), rows), Table("roof", heads, roof_rows)
