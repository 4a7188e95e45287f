"""Fills KV pages at memory speed, so that a long context is there without computing it.

Attention reads every key and value of the context whatever they are, so its speed may be measured
on any written pages. The program here writes, in every layer, a row of a small random table as key
and as value; it attends to nothing but the token itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import CpuKVPool, CpuOps, CpuWeight
from headrace.backends.ops import (
    PAGE_SIZE,
    AttentionSpec,
    Batch,
    CompiledForward,
    Limits,
    Ops,
    StepArrays,
    Tensor,
)
from headrace.types import StoredTensor

TABLE_ROWS = 1024
STEP_TOKENS = 512


def random_table(ops: CpuOps, rows: int, columns: int, seed: int = 0) -> CpuWeight:
    """Normal float32 values, as an embedding."""
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    stored = StoredTensor("table", "F32", values.shape, values.view(np.uint8).reshape(-1))
    return ops.weight(stored)


@dataclass(frozen=True)
class _Forward:
    table: CpuWeight
    kv: CpuKVPool

    def __call__(self, ops: Ops, batch: Batch) -> Tensor:
        spec = self.kv.spec
        x = ops.embedding(self.table, batch.token_ids)
        heads = ops.reshape(x, spec.num_kv_heads, spec.head_dim)
        for layer in range(spec.num_layers):
            nothing = AttentionSpec(layer, 1.0, window=1)
            ops.paged_attention(heads, heads, heads, batch, nothing)
        return ops.take_rows(x, batch.rows)


def compile_filler(ops: CpuOps, kv: CpuKVPool, limits: Limits) -> CompiledForward:
    """A forward that writes keys and values of a step into its pages; no output is worth
    anything."""
    table = random_table(ops, TABLE_ROWS, kv.spec.num_kv_heads * kv.spec.head_dim)
    # Not through an override of `compile`: what a subclass counts must not count this.
    run = CpuOps.compile(ops, _Forward(table, kv), kv, limits)

    def fill(step: StepArrays) -> NDArray[np.float32]:
        no_rows = np.empty(0, np.int32)
        return run(replace(step, token_ids=step.token_ids % TABLE_ROWS, rows=no_rows))

    return fill


def fill_pool(ops: CpuOps, kv: CpuKVPool) -> None:
    """Write every page of a pool."""
    fill = compile_filler(ops, kv, Limits(STEP_TOKENS, 1, 1, STEP_TOKENS))
    for begin in range(0, kv.spec.num_pages, STEP_TOKENS // PAGE_SIZE):
        pages = np.arange(begin, min(begin + STEP_TOKENS // PAGE_SIZE, kv.spec.num_pages))
        fill(sequence_step(pages.astype(np.int32)[None], len(pages) * PAGE_SIZE, 0))


def sequence_step(page_table: NDArray[np.int32], num_tokens: int, depth: int) -> StepArrays:
    """`num_tokens` of each sequence after `depth` tokens that are in its pages; all rows wanted.

    **Shapes** page_table [S, pages].
    """
    num_seqs = len(page_table)
    total = num_seqs * num_tokens
    return StepArrays(
        token_ids=np.arange(total, dtype=np.int32),
        positions=np.tile(np.arange(depth, depth + num_tokens, dtype=np.int32), num_seqs),
        cu_seqlens=np.arange(0, total + 1, num_tokens, dtype=np.int32),
        context_lens=np.full(num_seqs, depth + num_tokens, np.int32),
        page_table=np.ascontiguousarray(page_table, np.int32),
        rows=np.arange(total, dtype=np.int32),
    )
