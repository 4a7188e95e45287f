"""Filled pages hold the table's rows as keys and values, in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import CpuKVPool, CpuOps, CpuWeight
from headrace.backends.ops import PAGE_SIZE, AttentionSpec, Batch, KVSpec, Limits, Ops, Tensor
from headrace.bench.filling import STEP_TOKENS, fill_pool, sequence_step
from headrace.types import StoredTensor

HEADS, DIM, LAYERS = 2, 16, 2
F16_STEP = 2e-3  # keys and values are rounded to halves: 2^-11 relative, values up to 4


@dataclass(frozen=True)
class _Read:
    """Attention of one layer with the zero query sees the mean of all values."""

    zero: CpuWeight
    layer: int

    def __call__(self, ops: Ops, batch: Batch) -> Tensor:
        x = ops.embedding(self.zero, batch.token_ids)
        heads = ops.reshape(x, HEADS, DIM)
        out = ops.paged_attention(heads, heads, heads, batch, AttentionSpec(self.layer, 1.0))
        return ops.take_rows(out, batch.rows)


def sum_of_values(ops: CpuOps, kv: CpuKVPool, layer: int) -> NDArray[np.float32]:
    """Of all tokens of the pool but the last, which the reading token overwrites with zeros."""
    depth = kv.spec.num_pages * PAGE_SIZE - 1
    zeros = ops.weight(_zeros((1, HEADS * DIM)))
    run = ops.compile(_Read(zeros, layer), kv, Limits(1, 1, 1, depth + 1))
    pages = np.arange(kv.spec.num_pages, dtype=np.int32)[None]
    mean: NDArray[np.float32] = run(sequence_step(pages, 1, depth))[0]
    return mean * (depth + 1)


def _zeros(shape: tuple[int, ...]) -> StoredTensor:
    data = np.zeros(shape, np.float32).view(np.uint8).reshape(-1)
    return StoredTensor("zeros", "F32", shape, data)


def test_every_page_of_every_layer_is_written() -> None:
    ops = CpuOps(2)
    num_pages = STEP_TOKENS // PAGE_SIZE + 3  # one whole step and a short one
    kv = ops.kv_pool(KVSpec(LAYERS, HEADS, DIM, num_pages))
    fill_pool(ops, kv)
    rows = np.random.default_rng(0).standard_normal((1024, HEADS * DIM), np.float32)
    written = np.concatenate([rows[:STEP_TOKENS], rows[: 3 * PAGE_SIZE]])[:-1]
    expected = written.astype(np.float16).astype(np.float64).sum(axis=0)
    for layer in range(LAYERS):
        found = sum_of_values(ops, kv, layer)
        np.testing.assert_allclose(found, expected, atol=F16_STEP * len(written) ** 0.5)


def test_a_step_of_several_sequences() -> None:
    step = sequence_step(np.arange(4, dtype=np.int32).reshape(2, 2), 3, 20)
    assert step.positions.tolist() == [20, 21, 22, 20, 21, 22]
    assert step.cu_seqlens.tolist() == [0, 3, 6]
    assert step.context_lens.tolist() == [23, 23]
    assert step.rows.tolist() == [0, 1, 2, 3, 4, 5]
