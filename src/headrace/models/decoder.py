"""A loaded decoder: embedding, blocks, final norm and head, and the steps blocks are made of.

The functions here are what every decoder block does the same way; a block itself is in its
family's file. A forward only calls `Ops` methods and never looks at values, so a backend may
record it once and replay it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.backends.ops import AttentionSpec, Batch, KVSpec, Ops, Tensor, Weight
from headrace.models.spec import DecoderSpec
from headrace.models.weights import Weights

Block = Callable[[Ops, Batch, Tensor], Tensor]


@dataclass(frozen=True)
class Decoder:
    """A model ready to run on the backend its weights were made for.

    `weight_bytes` is what the taken tensors occupy in the file; `max_context` the longest sequence
    it was loaded for.
    """

    architecture: str
    spec: DecoderSpec
    embedding: Weight
    blocks: tuple[Block, ...]
    norm: Weight
    head: Weight
    weight_bytes: int
    max_context: int

    def forward(self, ops: Ops, batch: Batch) -> Tensor:
        """Logits of `batch.rows`. **Shapes** -> [R, vocab_size]."""
        x = ops.embedding(self.embedding, batch.token_ids)
        for block in self.blocks:
            x = block(ops, batch, x)
        return self.logits(ops, batch, x)

    def logits(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        """Final norm and head of the rows asked for."""
        x = ops.take_rows(x, batch.rows)
        x = ops.rms_norm(x, self.norm, self.spec.rms_norm_eps)
        return ops.linear(x, self.head)

    def kv_spec(self, num_pages: int, dtype: Literal["f16", "f32"] = "f16") -> KVSpec:
        """Geometry of a KV pool for this model."""
        spec = self.spec
        return KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, num_pages, dtype)


# ---- parts of a block


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)). **Source** arXiv 2002.05202."""

    gate: Weight
    up: Weight
    down: Weight

    def __call__(self, ops: Ops, x: Tensor, spec: DecoderSpec) -> Tensor:
        gate, up = ops.linear(x, self.gate), ops.linear(x, self.up)
        return ops.linear(ops.glu(gate, up, spec.activation), self.down)


def rotate(
    ops: Ops, batch: Batch, q: Tensor, k: Tensor, spec: DecoderSpec, layer: int
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of the layer on q and k, when it has one."""
    rope = spec.layers[layer].rope
    if rope is None:
        return q, k
    return ops.rope(q, batch.positions, rope), ops.rope(k, batch.positions, rope)


def attention_spec(spec: DecoderSpec, layer: int, softcap: float = 0.0) -> AttentionSpec:
    """How a layer attends, for `Ops.paged_attention`."""
    return AttentionSpec(layer, spec.attention_scale, spec.layers[layer].window, softcap)


def heads(ops: Ops, x: Tensor, spec: DecoderSpec) -> Tensor:
    """[T, n * head_dim] -> [T, n, head_dim]."""
    return ops.reshape(x, x.shape[-1] // spec.head_dim, spec.head_dim)


# ---- loading


def load_mlp(weights: Weights, spec: DecoderSpec, layer: int) -> GatedMLP:
    """The three matrices of a gated MLP."""
    wide, narrow = spec.intermediate_size, spec.hidden_size
    return GatedMLP(
        weights.matrix("gate", (wide, narrow), layer),
        weights.matrix("up", (wide, narrow), layer),
        weights.matrix("down", (narrow, wide), layer),
    )


def load_head(weights: Weights, spec: DecoderSpec) -> tuple[Weight, Weight]:
    """Embedding and head: one weight when tied."""
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = weights.matrix("embedding", shape)
    if not spec.is_tied:
        return embedding, weights.matrix("head", shape)
    weights.ignore("head")  # a duplicate that some exporters write; the tie decides
    return embedding, embedding
