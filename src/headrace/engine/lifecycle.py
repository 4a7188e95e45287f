"""From an open checkpoint to a running engine: backend, weights, and a KV pool that fits.

The pool is sized from what the machine really has left once the weights are loaded: available
memory, within this process's cgroup limit. Where the memory goes is computed, kept with the engine
and printed by whoever loads it; a pool too small for one useful sequence is refused with numbers.
Page-cache pages of memory-mapped weights count as available on Linux, so the sum is an estimate on
the safe side of `kv_memory_fraction`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.backends import NAMES, select
from headrace.backends.ops import PAGE_SIZE
from headrace.config import EngineConfig
from headrace.engine.loop import Capacity, Engine
from headrace.errors import InvalidRequest, OutOfMemory
from headrace.models import load_model
from headrace.types import Checkpoint

SMALLEST_CONTEXT = 512  # tokens: a short question and its answer; less is no use to anyone
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Where the memory goes. `available_bytes` is what was free before the pool was taken."""

    weight_bytes: int
    num_pages: int
    page_bytes: int
    available_bytes: int
    model_context: int
    max_context: int
    limited_by: str

    @property
    def kv_bytes(self) -> int:
        """The pool: pages times bytes."""
        return self.num_pages * self.page_bytes

    def __str__(self) -> str:
        total = self.weight_bytes + self.kv_bytes
        lines = [
            f"weights   {self.weight_bytes / _MIB:10.1f} MiB",
            f"KV pool   {self.kv_bytes / _MIB:10.1f} MiB = {self.num_pages} pages of {PAGE_SIZE} "
            f"tokens x {self.page_bytes / 1024:.1f} KiB (limited by {self.limited_by})",
            f"together  {total / _MIB:10.1f} MiB",
            f"context   {self.max_context:10d} tokens",
        ]
        if self.max_context < self.model_context:
            lines[-1] += f", less than the model's {self.model_context}"
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and the account of its memory."""

    engine: Engine
    memory: MemoryReport


def load_engine(
    checkpoint: Checkpoint, config: EngineConfig, *, eos_token_ids: tuple[int, ...]
) -> LoadedEngine:
    """Load a model and start an engine on it.

    **Raises** `FormatError`, `UnsupportedModel`, `InvalidRequest`, `OutOfMemory`.
    """
    check_config(config)
    ops = select(config.backend, config.num_threads)
    model = load_model(checkpoint, ops, max_context=config.max_context)
    page_bytes = model.kv_spec(1, config.kv_dtype).bytes_per_page
    memory = plan_memory(
        config,
        page_bytes=page_bytes,
        weight_bytes=model.weight_bytes,
        model_context=model.spec.context_length,
        available_bytes=available_memory(),
    )
    capacity = Capacity(memory.num_pages, memory.max_context)
    engine = Engine(model, ops, config, capacity=capacity, eos_token_ids=eos_token_ids)
    return LoadedEngine(engine, memory)


def check_config(config: EngineConfig) -> None:
    """**Raises** `InvalidRequest` for an option of the wrong type or out of range."""
    for name, low, high in _INTEGERS:
        value = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequest(
                f"{name} is {value!r}; it must be an integer from {low} to {high}", param=name
            )
    fraction = config.kv_memory_fraction
    if not isinstance(fraction, int | float) or not 0.0 < fraction <= 1.0:
        raise InvalidRequest(
            f"kv_memory_fraction is {fraction!r}; it must be above 0, at most 1",
            param="kv_memory_fraction",
        )
    for name, allowed in _CHOICES:
        value = getattr(config, name)
        if value not in allowed:
            raise InvalidRequest(
                f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}",
                param=name,
            )


# The step's buffers grow with `step_tokens` and `max_running`: past the limits here they would
# take the machine's memory, unseen by the plan below.
_INTEGERS = (
    ("max_running", 1, 1024),
    ("max_waiting", 1, 1 << 20),
    ("step_tokens", 1, 1 << 14),
    ("num_threads", 0, 256),
    ("max_context", 2, 1 << 31),
    ("kv_cache_bytes", 1, 1 << 50),
    ("kv_cache_max_bytes", 1, 1 << 50),
)
_OPTIONAL = ("max_context", "kv_cache_bytes")
_CHOICES: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("backend", NAMES),
    ("kv_dtype", ("f16", "f32")),
    ("prefix_cache", (True, False)),
)


def plan_memory(
    config: EngineConfig,
    *,
    page_bytes: int,
    weight_bytes: int,
    model_context: int,
    available_bytes: int,
) -> MemoryReport:
    """Size the KV pool. Pure.

    **Raises** `OutOfMemory` when the smallest useful sequence does not fit.
    """
    context = min(model_context, config.max_context or model_context)
    smallest = -(-min(context, SMALLEST_CONTEXT) // PAGE_SIZE)
    num_pages, limited_by = _pool_pages(config, page_bytes, context, available_bytes)
    if num_pages < smallest and config.kv_cache_bytes is None:
        num_pages, limited_by = smallest, "the smallest useful context"
    if num_pages < smallest or num_pages * page_bytes > available_bytes:
        raise OutOfMemory(_too_small(smallest, num_pages, page_bytes, available_bytes))
    return MemoryReport(
        weight_bytes=weight_bytes,
        num_pages=num_pages,
        page_bytes=page_bytes,
        available_bytes=available_bytes,
        model_context=model_context,
        max_context=min(context, num_pages * PAGE_SIZE),
        limited_by=limited_by,
    )


def _pool_pages(
    config: EngineConfig, page_bytes: int, context: int, available_bytes: int
) -> tuple[int, str]:
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // page_bytes, "kv_cache_bytes"
    useful = config.max_running * -(-context // PAGE_SIZE)
    part = int(available_bytes * config.kv_memory_fraction)
    percent = round(100 * config.kv_memory_fraction)
    return min(
        (part // page_bytes, f"{percent}% of {available_bytes / _MIB:.0f} MiB available"),
        (config.kv_cache_max_bytes // page_bytes, "kv_cache_max_bytes"),
        (useful, f"{config.max_running} sequences of {context} tokens"),
    )


def _too_small(smallest: int, num_pages: int, page_bytes: int, available_bytes: int) -> str:
    wanted = max(smallest, num_pages)
    return (
        f"the KV pool needs {wanted} pages x {page_bytes} bytes = "
        f"{wanted * page_bytes / _MIB:.1f} MiB and gets {num_pages} pages "
        f"({num_pages * page_bytes / _MIB:.1f} MiB); {available_bytes / _MIB:.1f} MiB are "
        "available. Free memory, take a smaller model, or set kv_cache_bytes"
    )


# ---- the machine


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the kernel's estimate, within its cgroup limits."""
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():  # not Linux: physical memory is the best guess without more libraries
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([_mem_available(meminfo.read_text()), *_cgroup_rooms(root)])


def _mem_available(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OutOfMemory("/proc/meminfo has no MemAvailable line; set kv_cache_bytes yourself")


def _cgroup_rooms(root: Path) -> list[int]:
    """Limit minus use of each cgroup this process is in, version 1 and 2. Caches the kernel can
    drop count as room."""
    groups = root / "proc/self/cgroup"
    if not groups.exists():
        return []
    rooms = []
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = Path(path.lstrip("/"))
        for folder in (base / parts, *(base / parent for parent in parts.parents)):
            room = _room(folder, *names)
            if room is not None:
                rooms.append(room)
    return rooms


def _room(folder: Path, limit_name: str, use_name: str, cache_key: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / use_name).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None  # no such group here, or none of our business
    if limit == "max":
        return None
    cache = next((int(v) for k, v in map(str.split, stat.splitlines()) if k == cache_key), 0)
    return max(0, int(limit) - used + cache)
