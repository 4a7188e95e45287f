"""Runs a whole prompt through a model on the reference backend and says how far logits differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ops import PAGE_SIZE, Limits, Ops, StepArrays
from headrace.backends.reference import ReferenceOps
from headrace.models import Model

Array = NDArray[np.float32]

# Float32 rounding through a few dozen layers leaves 1e-6 to 3e-5; a wrong formula leaves 1e-2.
TOLERANCE = 1e-4


def whole_step(tokens: NDArray[np.int32], rows: list[int]) -> StepArrays:
    """One sequence from its start, on pages 0, 1, 2..."""
    n = len(tokens)
    pages = -(-n // PAGE_SIZE)
    return StepArrays(
        token_ids=tokens,
        positions=np.arange(n, dtype=np.int32),
        cu_seqlens=np.array([0, n], np.int32),
        context_lens=np.array([n], np.int32),
        page_table=np.arange(pages, dtype=np.int32)[None],
        rows=np.array(rows, np.int32),
    )


def logits_of(
    model: Model, tokens: NDArray[np.int32], rows: list[int] | None = None, ops: Ops | None = None
) -> Array:
    """Logits of the rows wanted (all by default), with a float32 cache."""
    ops = ops or ReferenceOps(batch_invariant=False)
    rows = list(range(len(tokens))) if rows is None else rows
    kv = ops.kv_pool(model.kv_spec(-(-len(tokens) // PAGE_SIZE), "f32"))
    run = ops.compile(model.forward, kv, Limits(len(tokens), 1, len(rows), len(tokens)))
    return run(whole_step(tokens, rows))


def relative_error(ours: Array, expected: Array) -> float:
    """Largest over rows of max |ours - expected| / max |expected|."""
    difference = np.abs(ours.astype(np.float64) - expected).max(axis=-1)
    return float((difference / np.abs(expected).max(axis=-1)).max())
