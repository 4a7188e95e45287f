"""Loads a model as the service does, with the time of each part.

Not a second way to load: the parts are the lifecycle's own, only called one by one so that a clock
fits between them and the backend can be one that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headrace.backends.cpu import CpuOps
from headrace.config import EngineConfig
from headrace.engine.lifecycle import MemoryReport, available_memory, check_config, plan_memory
from headrace.engine.loop import Capacity, Engine
from headrace.formats.checkpoint import open_checkpoint
from headrace.models import Model, load_model
from headrace.observe import monotonic_s
from headrace.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """`open`: the file's header; `weights`: repacking; `engine`: KV pool, recording, thread."""

    open: float
    tokenizer: float
    weights: float
    engine: float


@dataclass(frozen=True)
class Opened:
    """A running engine and what it was made of."""

    ops: CpuOps
    model: Model
    engine: Engine
    memory: MemoryReport
    file_bytes: int
    seconds: LoadSeconds


def open_engine(
    path: Path, config: EngineConfig, make_ops: Callable[[int], CpuOps] = CpuOps
) -> Opened:
    """**Raises** what loading raises."""
    check_config(config)
    times = [monotonic_s()]
    checkpoint = open_checkpoint(path)
    times.append(monotonic_s())
    eos_ids = tuple(load_tokenizer(checkpoint).eos_ids)
    times.append(monotonic_s())
    ops = make_ops(config.num_threads)
    model = load_model(checkpoint, ops, max_context=config.max_context)
    times.append(monotonic_s())
    memory = plan_memory(
        config,
        page_bytes=model.kv_spec(1, config.kv_dtype).bytes_per_page,
        weight_bytes=model.weight_bytes,
        model_context=model.spec.context_length,
        available_bytes=available_memory(),
    )
    capacity = Capacity(memory.num_pages, memory.max_context)
    engine = Engine(model, ops, config, capacity=capacity, eos_token_ids=eos_ids)
    times.append(monotonic_s())
    parts = LoadSeconds(*(b - a for a, b in pairwise(times)))
    return Opened(ops, model, engine, memory, _size(path), parts)


def _size(path: Path) -> int:
    """Of a file, or of the weights in a folder."""
    if path.is_dir():
        return sum(item.stat().st_size for item in path.glob("*.safetensors"))
    return path.stat().st_size
