"""The reference backend: every op of `ops.Ops` in plain numpy float32, run at once.

It is the meaning the other backends are tested against: slow, obvious, and it checks its inputs.
Weights are decoded to float32 when loaded. With `batch_invariant` (the default) each row of a step
is computed by itself, so a row's bits cannot depend on its batch mates; without it one matrix
product serves all rows, which is faster for long prompts and equal up to rounding.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ops import (
    PAGE_SIZE,
    Activation,
    AttentionSpec,
    Batch,
    CompiledForward,
    Forward,
    KVSpec,
    Limits,
    Rope,
    StepArrays,
)
from headrace.formats import blocks
from headrace.types import StoredTensor

Array = NDArray[np.float32]
Ids = NDArray[np.int32]

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
SQRT_HALF = math.sqrt(0.5)
ERF = np.vectorize(math.erf, otypes=[np.float32])


@dataclass(frozen=True)
class KVPool:
    """Keys and values of all layers; the arrays are written by `paged_attention`.

    **Shapes** keys, values [num_layers, num_pages, PAGE_SIZE, num_kv_heads, head_dim] in
    `spec.dtype`.
    """

    spec: KVSpec
    keys: NDArray[np.floating]
    values: NDArray[np.floating]


class ReferenceOps:
    """`Ops` over numpy arrays; tensors and weights are float32 arrays."""

    name = "reference"

    def __init__(self, batch_invariant: bool = True) -> None:
        self.batch_invariant = batch_invariant

    # ---- memory
    def weight(self, stored: StoredTensor) -> Array:
        """Decode to float32."""
        assert len(stored.shape) in (1, 2), f"{stored.name}: weights have one or two axes"
        return blocks.decode(stored.kind, stored.data, stored.shape)

    def weight_rows(self, parts: tuple[StoredTensor, ...]) -> Array:
        """Decode and stack along the out axis."""
        assert len({(p.kind, p.shape[1:]) for p in parts}) == 1, "shards must agree"
        return np.concatenate([self.weight(part) for part in parts])

    def kv_pool(self, spec: KVSpec) -> KVPool:
        """Zeroed pages."""
        shape = (spec.num_layers, spec.num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        dtype = np.float16 if spec.dtype == "f16" else np.float32
        return KVPool(spec, np.zeros(shape, dtype), np.zeros(shape, dtype))

    def compile(self, forward: Forward, kv: KVPool, limits: Limits) -> CompiledForward:
        """No compilation: checks the step, then runs `forward`."""

        def run(arrays: StepArrays) -> Array:
            check_step(arrays, kv.spec.num_pages, limits)
            batch = Batch(arrays.token_ids, arrays.positions, arrays.rows, arrays, kv)
            logits: Array = forward(self, batch)
            assert logits.dtype == np.float32
            assert len(logits) == len(arrays.rows)
            return logits

        return run

    # ---- compute
    def embedding(self, table: Array, token_ids: Ids) -> Array:
        """Rows of the table."""
        assert np.all((token_ids >= 0) & (token_ids < len(table))), "token id out of range"
        return table[token_ids]

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """x @ weight.T + bias."""
        assert x.shape[-1] == weight.shape[1], (x.shape, weight.shape)
        if self.batch_invariant:
            y = np.empty((len(x), len(weight)), np.float32)
            for row, out in zip(x, y, strict=True):
                out[:] = weight @ row
        else:
            y = x @ weight.T
        return y if bias is None else y + bias

    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight."""
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        y: Array = x / np.sqrt(mean + np.float32(eps))
        return y if weight is None else y * weight

    def rope(self, x: Array, positions: Ids, rope: Rope) -> Array:
        """Rotate pairs by position * inv_freq; angles in float64."""
        half = len(rope.inv_freq)
        assert 2 * half <= x.shape[-1], "rotary_dim exceeds head_dim"
        angle = positions.astype(np.float64)[:, None] * np.asarray(rope.inv_freq)
        cos = (np.cos(angle) * rope.factor).astype(np.float32)[:, None, :]
        sin = (np.sin(angle) * rope.factor).astype(np.float32)[:, None, :]
        if rope.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        a, b = x[..., first], x[..., second]
        y = x.copy()
        y[..., first] = a * cos - b * sin
        y[..., second] = b * cos + a * sin
        return y

    def paged_attention(
        self, q: Array, k: Array, v: Array, batch: Batch, spec: AttentionSpec
    ) -> Array:
        """Store k and v, then softmax attention, one sequence at a time."""
        step: StepArrays = batch.step
        kv: KVPool = batch.kv
        out = np.empty_like(q)
        for s, (begin, end) in enumerate(itertools.pairwise(step.cu_seqlens.tolist())):
            context_len = int(step.context_lens[s])
            pages = step.page_table[s, : num_pages(context_len)]
            position = step.positions[begin:end]
            where = (spec.layer, pages[position // PAGE_SIZE], position % PAGE_SIZE)
            with np.errstate(over="ignore"):  # a key beyond half range becomes inf, as stored
                kv.keys[where] = k[begin:end]
                kv.values[where] = v[begin:end]
            keys = kv.keys[spec.layer, pages].reshape(-1, *k.shape[1:])[:context_len]
            values = kv.values[spec.layer, pages].reshape(-1, *v.shape[1:])[:context_len]
            answer = attend_rows if self.batch_invariant else attend
            out[begin:end] = answer(
                q[begin:end], keys.astype(np.float32), values.astype(np.float32), position, spec
            )
        return out.reshape(len(q), -1)

    def glu(self, gate: Array, up: Array, activation: Activation) -> Array:
        """activation(gate) * up."""
        return activate(gate, activation) * up

    def add(self, a: Array, b: Array) -> Array:
        """a + b."""
        assert a.shape == b.shape, (a.shape, b.shape)
        return a + b

    def scale(self, x: Array, factor: float) -> Array:
        """x * factor."""
        return x * np.float32(factor)

    def softcap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap)."""
        y: Array = np.tanh(x / np.float32(cap)) * np.float32(cap)
        return y

    def take_rows(self, x: Array, rows: Ids) -> Array:
        """x[rows]."""
        return x[rows]

    def reshape(self, x: Array, *tail: int) -> Array:
        """The first axis stays."""
        return x.reshape(len(x), *tail)


def attend_rows(q: Array, keys: Array, values: Array, position: Ids, spec: AttentionSpec) -> Array:
    """`attend` for each query by itself, over exactly the keys it sees."""
    out = np.empty_like(q)
    for t, p in enumerate(position.tolist()):
        seen = slice(max(0, p + 1 - spec.window) if spec.window else 0, p + 1)
        out[t] = attend(q[t : t + 1], keys[seen], values[seen], None, spec)[0]
    return out


def attend(
    q: Array, keys: Array, values: Array, position: Ids | None, spec: AttentionSpec
) -> Array:
    """Softmax attention of several queries; without positions every query sees every key.

    **Shapes** q [n, num_heads, head_dim]; keys, values [c, num_kv_heads, head_dim], key j at
    position j -> [n, num_heads, head_dim].
    """
    n, num_heads, head_dim = q.shape
    c, num_kv_heads, _ = keys.shape
    grouped = q.reshape(n, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)  # [kv, group, n, d]
    scores = np.matmul(grouped, keys.transpose(1, 2, 0)[:, None]) * np.float32(spec.scale)
    if spec.softcap:
        scores = np.float32(spec.softcap) * np.tanh(scores / np.float32(spec.softcap))
    if position is not None:
        distance = position[:, None] - np.arange(c)
        hidden = (distance < 0) | ((distance >= spec.window) if spec.window else False)
        scores = np.where(hidden, np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = np.matmul(weights, values.transpose(1, 0, 2)[:, None])  # [kv, group, n, d]
    return mixed.transpose(2, 0, 1, 3).reshape(n, num_heads, head_dim)


def activate(x: Array, activation: Activation) -> Array:
    """SiLU, exact GELU, or its tanh approximation."""
    one = np.float32(1)
    with np.errstate(over="ignore"):  # inf inside gives the right limit outside: 0 or x
        if activation == "silu":
            decay: Array = np.exp(-x)
            return x / (decay + one)
        if activation == "gelu_tanh":
            cubic = x + x * x * x * np.float32(0.044715)
            bell: Array = np.tanh(cubic * np.float32(SQRT_2_OVER_PI))
        else:
            assert activation == "gelu", activation
            bell = ERF(x * np.float32(SQRT_HALF))
        return x * np.float32(0.5) * (bell + one)


def num_pages(context_len: int) -> int:
    """Pages that hold `context_len` tokens."""
    return -(-context_len // PAGE_SIZE)


def check_step(arrays: StepArrays, pool_pages: int, limits: Limits) -> None:
    """Assert what the runner promises: shapes, ranges, order, and one writer per page."""
    for field in ("token_ids", "positions", "cu_seqlens", "context_lens", "page_table", "rows"):
        assert getattr(arrays, field).dtype == np.int32, f"{field} must be int32"
    num_tokens, num_seqs = len(arrays.token_ids), len(arrays.context_lens)
    assert arrays.positions.shape == (num_tokens,), "one position per token"
    assert arrays.cu_seqlens.shape == (num_seqs + 1,), "cu_seqlens has S + 1 entries"
    assert len(arrays.page_table) == num_seqs, "one page list per sequence"
    assert 0 < num_tokens <= limits.max_tokens, "step exceeds max_tokens"
    assert num_seqs <= limits.max_seqs, "step exceeds max_seqs"
    assert len(arrays.rows) <= limits.max_rows, "step exceeds max_rows"
    assert np.all((arrays.rows >= 0) & (arrays.rows < num_tokens)), "row out of range"
    assert arrays.cu_seqlens[0] == 0, "cu_seqlens starts at 0"
    assert arrays.cu_seqlens[-1] == num_tokens, "cu_seqlens ends at T"
    writers: set[int] = set()
    for s, (begin, end) in enumerate(itertools.pairwise(arrays.cu_seqlens.tolist())):
        context_len = int(arrays.context_lens[s])
        first = context_len - (end - begin)
        assert 0 < end - begin <= context_len, f"sequence {s} has no tokens or too many"
        assert context_len <= limits.max_context, f"sequence {s} exceeds max_context"
        expected = np.arange(first, context_len)
        assert np.array_equal(arrays.positions[begin:end], expected), f"positions of sequence {s}"
        pages = arrays.page_table[s, : num_pages(context_len)].tolist()
        assert len(pages) == num_pages(context_len) == len(set(pages)), f"pages of sequence {s}"
        assert all(0 <= page < pool_pages for page in pages), f"page of sequence {s} out of range"
        written = set(pages[first // PAGE_SIZE :])
        assert not writers & written, f"sequence {s} writes a page of another"
        writers |= written
