"""What the machine is, and its roof: how fast it can read memory, and multiply.

Generation cannot beat these: a token at batch 1 reads every weight once, a long prompt is all int8
multiplications. The loops are native (csrc/roof.inl), run by the backend's own threads over memory
laid out as weights are. On shared machines the roof moves by the second (memory bandwidth is also
the neighbours'), so it is sampled beside what is compared with it, all through a run.
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
from headrace.bench.measuring import Spread, Table, calls_in, sample, spread
from headrace.observe import monotonic_s
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
    """Over all samples of a run. An operation is a multiplication or an addition."""

    num_threads: int
    isa: str
    read_gb_s: Spread
    int8_gop_s: Spread
    fp32_gop_s: Spread


@dataclass(frozen=True, slots=True)
class RoofSettings:
    """`read_bytes`: much more than the caches hold. `sample_s`: of multiplying."""

    read_bytes: int
    sample_s: float = 0.01
    repeat: int = 5


def roof_settings() -> RoofSettings:
    """For this machine."""
    return RoofSettings(max(LEAST_READ_BYTES, 8 * last_cache_bytes()))


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


class Probe:
    """Takes samples of the roof, and keeps them."""

    def __init__(self, ops: CpuOps, settings: RoofSettings | None = None) -> None:
        settings = settings or roof_settings()
        self._ops = ops
        self._memory = _memory(ops, settings.read_bytes)
        self._rounds = {is_int8: _rounds(ops, is_int8, settings) for is_int8 in (True, False)}
        self._read: list[float] = []
        self._peaks: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(settings.repeat):
            self.read_gb_s()
            self.peak_gop_s(is_int8=True)
            self.peak_gop_s(is_int8=False)

    def read_gb_s(self) -> float:
        """One sample, some 10 ms."""
        seconds = sample(lambda: self._ops.read_sum(self._memory), 1)
        self._read.append(self._memory.num_bytes / 1e9 / seconds)
        return self._read[-1]

    def peak_gop_s(self, is_int8: bool) -> float:
        """One sample of int8 or float32 operations."""
        begin_s = monotonic_s()
        num_ops = self._ops.peak(is_int8, self._rounds[is_int8])
        self._peaks[is_int8].append(num_ops / 1e9 / (monotonic_s() - begin_s))
        return self._peaks[is_int8][-1]

    def roof(self) -> Roof:
        """All samples so far."""
        ops = self._ops
        int8, fp32 = spread(self._peaks[True]), spread(self._peaks[False])
        return Roof(ops.num_threads, ops.isa, spread(self._read), int8, fp32)


def _memory(ops: CpuOps, num_bytes: int) -> CpuWeight:
    """A packed float matrix of about `num_bytes`, every page written."""
    shape = (BLOCK_ROWS, BLOCK_COLUMNS)
    data = np.ones(shape, np.float32).view(np.uint8).reshape(-1)
    block = StoredTensor("roof", "F32", shape, data)
    return ops.weight_rows((block,) * max(1, num_bytes // data.nbytes))


def _rounds(ops: CpuOps, is_int8: bool, settings: RoofSettings) -> int:
    few = 10_000  # of about 10 ns
    ops.peak(is_int8, few)
    return few * calls_in(lambda: ops.peak(is_int8, few), settings.sample_s)


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
            str(roof.read_gb_s),
            str(roof.int8_gop_s),
            str(roof.fp32_gop_s),
        )
        for roof in roofs
    )
    heads = ("threads", "ISA", "read GB/s", "int8 GOP/s", "fp32 GOP/s")
    return Table("machine", ("", ""), rows), Table("roof", heads, roof_rows)
