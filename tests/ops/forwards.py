"""Small forwards and steps for tests that compare backends: built once per `Ops`, run on any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from kernel_cases import Array, i32, normal, stored
from numpy.typing import NDArray

from headrace.backends.ops import (
    PAGE_SIZE,
    AttentionSpec,
    Batch,
    CompiledForward,
    Forward,
    KVSpec,
    Limits,
    Ops,
    Rope,
    StepArrays,
    Tensor,
)
from headrace.types import StoredTensor

Build = Callable[[Ops], Forward]  # makes the weights, returns the forward that uses them
Op = Callable[[Ops, Tensor, Batch], Tensor]


@dataclass(frozen=True)
class Span:
    """Tokens [begin, end) of a sequence whose pages are `pages`; its token ids are positions plus
    `first_id`."""

    begin: int
    end: int
    pages: Sequence[int]
    first_id: int = 0


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def step_of(spans: Sequence[Span], rows: NDArray[np.int32] | None = None) -> StepArrays:
    """One step of several sequences; all rows are wanted unless `rows` says which."""
    positions = np.concatenate([np.arange(s.begin, s.end) for s in spans]).astype(np.int32)
    first_ids = np.repeat([s.first_id for s in spans], [s.end - s.begin for s in spans])
    table = np.full((len(spans), max(pages_for(s.end) for s in spans)), -1, np.int32)
    for i, span in enumerate(spans):
        count = pages_for(span.end)
        table[i, :count] = span.pages[:count]
    return StepArrays(
        token_ids=(positions + first_ids).astype(np.int32),
        positions=positions,
        cu_seqlens=i32(*np.cumsum([0, *(s.end - s.begin for s in spans)])),
        context_lens=i32(*(s.end for s in spans)),
        page_table=table,
        rows=np.arange(len(positions), dtype=np.int32) if rows is None else rows,
    )


def in_chunks(run: CompiledForward, span: Span, size: int) -> Array:
    """Rows of a span that is run `size` tokens at a time."""
    starts = range(span.begin, span.end, size)
    parts = [Span(a, min(a + size, span.end), span.pages, span.first_id) for a in starts]
    return np.concatenate([run(step_of([part])).copy() for part in parts])


def compiled(
    ops: Ops, build: Build, spec: KVSpec, max_tokens: int, max_seqs: int
) -> CompiledForward:
    limits = Limits(max_tokens, max_seqs, max_tokens, spec.num_pages * PAGE_SIZE)
    return ops.compile(build(ops), ops.kv_pool(spec), limits)


# ---- forwards


def on_rows_of(table: Array, op: Op) -> Build:
    """`op` on rows of a table: token i is row i; the result is flattened."""

    def build(ops: Ops) -> Forward:
        weight = ops.weight(stored(table))

        def forward(ops: Ops, batch: Batch) -> Tensor:
            x = op(ops, ops.embedding(weight, batch.token_ids), batch)
            width = int(np.prod(x.shape[1:]))
            return ops.take_rows(ops.reshape(x, width), batch.rows)

        return forward

    return build


def attention_of(q: Array, k: Array, v: Array, spec: AttentionSpec) -> Build:
    """Attention where token i has the query q[i] and writes k[i], v[i].

    **Shapes** q [n, num_heads, head_dim]; k, v [n, num_kv_heads, head_dim].
    """

    def build(ops: Ops) -> Forward:
        tables = [ops.weight(stored(x.reshape(len(x), -1))) for x in (q, k, v)]

        def forward(ops: Ops, batch: Batch) -> Tensor:
            rows = [ops.embedding(table, batch.token_ids) for table in tables]
            heads = [ops.reshape(x, *y.shape[1:]) for x, y in zip(rows, (q, k, v), strict=True)]
            mixed = ops.paged_attention(heads[0], heads[1], heads[2], batch, spec)
            return ops.take_rows(mixed, batch.rows)

        return forward

    return build


VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 48, 256, 4, 2, 64, 512
DECODER_KV = KVSpec(2, KV_HEADS, HEAD_DIM, 16)
DECODER_SHAPES = {
    "embed": (VOCAB, WIDTH),
    "q": (HEADS * HEAD_DIM, WIDTH),
    "k": (KV_HEADS * HEAD_DIM, WIDTH),
    "v": (KV_HEADS * HEAD_DIM, WIDTH),
    "o": (WIDTH, HEADS * HEAD_DIM),
    "gate": (INNER, WIDTH),
    "up": (INNER, WIDTH),
    "down": (WIDTH, INNER),
    "head": (VOCAB, WIDTH),
}


def decoder(kinds: dict[str, str]) -> Build:
    """A two-layer decoder with every op in it; `kinds` names the block kind of each matrix."""
    shapes = DECODER_SHAPES.items()
    tensors: dict[str, StoredTensor] = {
        name: stored(normal(i, *shape) / np.float32(np.sqrt(shape[1])), kinds[name])
        for i, (name, shape) in enumerate(shapes)
    }
    bias = stored(normal(90, KV_HEADS * HEAD_DIM) * np.float32(0.1))
    gain = stored(1 + normal(91, WIDTH) * np.float32(0.1))
    rope = Rope(tuple((1e4 ** -(np.arange(24) / 24)).tolist()), interleaved=False)

    def build(ops: Ops) -> Forward:
        w = {name: ops.weight(tensor) for name, tensor in tensors.items()}
        b, g = ops.weight(bias), ops.weight(gain)

        def layer(ops: Ops, x: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
            h = ops.rms_norm(x, g, 1e-6)
            q = ops.reshape(ops.linear(h, w["q"]), HEADS, HEAD_DIM)
            k = ops.reshape(ops.linear(h, w["k"], b), KV_HEADS, HEAD_DIM)
            v = ops.reshape(ops.linear(h, w["v"], b), KV_HEADS, HEAD_DIM)
            q = ops.rope(ops.rms_norm(q, None, 1e-6), batch.positions, rope)
            k = ops.rope(k, batch.positions, rope)
            x = ops.add(x, ops.linear(ops.paged_attention(q, k, v, batch, spec), w["o"]))
            h = ops.rms_norm(x, g, 1e-6)
            gated = ops.glu(ops.linear(h, w["gate"]), ops.linear(h, w["up"]), "silu")
            return ops.add(x, ops.linear(gated, w["down"]))

        def forward(ops: Ops, batch: Batch) -> Tensor:
            x = ops.scale(ops.embedding(w["embed"], batch.token_ids), WIDTH**0.5)
            x = layer(ops, x, batch, AttentionSpec(0, 0.3, window=20))
            x = layer(ops, x, batch, AttentionSpec(1, 0.3, softcap=30.0))
            x = ops.rms_norm(ops.take_rows(x, batch.rows), g, 1e-6)
            return ops.softcap(ops.linear(x, w["head"]), 20.0)

        return forward

    return build
