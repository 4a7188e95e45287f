"""A loaded decoder: embedding, blocks, final norm and head.

A forward only calls `Ops` methods and never looks at values, so a backend may record it once and
replay it. Blocks come from the family; everything around them is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.backends.ops import Batch, KVSpec, Ops, Tensor, Weight
from headrace.models.spec import DecoderSpec
from headrace.models.weights import Weights

Block = Callable[[Ops, Batch, Tensor], Tensor]
BlockLoader = Callable[[Weights, DecoderSpec, int], Block]


@dataclass(frozen=True)
class Decoder:
    """A model ready to run on the backend its weights were made for.

    `weight_bytes` is what its tensors occupy in the file; `max_context` the longest sequence it
    was loaded for.
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
        spec = self.spec
        x = ops.embedding(self.embedding, batch.token_ids)
        if spec.embedding_scale != 1.0:
            x = ops.scale(x, spec.embedding_scale)
        for block in self.blocks:
            x = block(ops, batch, x)
        x = ops.rms_norm(ops.take_rows(x, batch.rows), self.norm, spec.rms_norm_eps)
        logits = ops.linear(x, self.head)
        return ops.softcap(logits, spec.final_softcap) if spec.final_softcap else logits

    def kv_spec(self, num_pages: int, dtype: Literal["f16", "f32"] = "f16") -> KVSpec:
        """Geometry of a KV pool for this model."""
        spec = self.spec
        return KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, num_pages, dtype)


def load_decoder(
    architecture: str, spec: DecoderSpec, weights: Weights, block: BlockLoader, max_context: int
) -> Decoder:
    """Weights into a decoder, blocks by the family's loader."""
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = weights.matrix("embedding", shape)
    if spec.is_tied:
        weights.ignore("head")  # a duplicate that some exporters write; the tie decides
    return Decoder(
        architecture,
        spec,
        embedding,
        blocks=tuple(block(weights, spec, layer) for layer in range(spec.num_layers)),
        norm=weights.vector("norm", spec.hidden_size),
        head=embedding if spec.is_tied else weights.matrix("head", shape),
        weight_bytes=weights.num_bytes,
        max_context=max_context,
    )
