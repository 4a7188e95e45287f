"""The parts decoder blocks are made of, each with the loader that takes its weights.

Attention in three forms (plain, with biases on q, k and v, with norms on q and k), the gated MLP,
and the pre-norm block x += attention(norm(x)); x += mlp(norm(x)). What only one family has stands
in that family's file. **Shapes** throughout: x [T, hidden_size].
Source: arXiv 2305.13245 (grouped queries), 2104.09864 (RoPE), 2002.05202 (gated MLP), 2302.05442
(norms on q and k).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.backends.ops import AttentionSpec, Batch, Ops, Tensor, Weight
from headrace.models.spec import DecoderSpec
from headrace.models.weights import Weights

AttentionPart = Callable[[Ops, Batch, Tensor], Tensor]


# ---- attention


@dataclass(frozen=True)
class Projections:
    """The four matrices of an attention layer, and which layer it is."""

    spec: DecoderSpec
    layer: int
    q: Weight
    k: Weight
    v: Weight
    o: Weight


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary positions."""

    to: Projections

    def __call__(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        q, k, v = ops.linear(x, self.to.q), ops.linear(x, self.to.k), ops.linear(x, self.to.v)
        spec = self.to.spec
        return attend(ops, batch, heads(ops, q, spec), heads(ops, k, spec), v, self.to)


@dataclass(frozen=True)
class BiasedAttention:
    """The same with biases on q, k and v."""

    to: Projections
    q_bias: Weight
    k_bias: Weight
    v_bias: Weight

    def __call__(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        q = ops.linear(x, self.to.q, self.q_bias)
        k = ops.linear(x, self.to.k, self.k_bias)
        v = ops.linear(x, self.to.v, self.v_bias)
        spec = self.to.spec
        return attend(ops, batch, heads(ops, q, spec), heads(ops, k, spec), v, self.to)


@dataclass(frozen=True)
class NormedAttention:
    """The same with a norm over each head of q and k, before rotation."""

    to: Projections
    q_norm: Weight
    k_norm: Weight

    def __call__(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        spec = self.to.spec
        q = heads(ops, ops.linear(x, self.to.q), spec)
        k = heads(ops, ops.linear(x, self.to.k), spec)
        v = ops.linear(x, self.to.v)
        q = ops.rms_norm(q, self.q_norm, spec.rms_norm_eps)
        k = ops.rms_norm(k, self.k_norm, spec.rms_norm_eps)
        return attend(ops, batch, q, k, v, self.to)


def heads(ops: Ops, x: Tensor, spec: DecoderSpec) -> Tensor:
    """[T, n * head_dim] -> [T, n, head_dim]."""
    return ops.reshape(x, x.shape[-1] // spec.head_dim, spec.head_dim)


def attend(
    ops: Ops, batch: Batch, q: Tensor, k: Tensor, v: Tensor, to: Projections
) -> Tensor:  # fmt: skip
    """Rotate, attend, project. **Shapes** q, k [T, heads, head_dim]; v [T, kv_size]."""
    spec, layer = to.spec, to.spec.layers[to.layer]
    if layer.rope is not None:
        q = ops.rope(q, batch.positions, layer.rope)
        k = ops.rope(k, batch.positions, layer.rope)
    how = AttentionSpec(to.layer, spec.attention_scale, layer.window, spec.attention_softcap)
    return ops.linear(ops.paged_attention(q, k, heads(ops, v, spec), batch, how), to.o)


def load_projections(weights: Weights, spec: DecoderSpec, layer: int) -> Projections:
    """q, k, v and o as separate matrices."""
    hidden = spec.hidden_size
    return Projections(
        spec,
        layer,
        q=weights.matrix("q", (spec.q_size, hidden), layer),
        k=weights.matrix("k", (spec.kv_size, hidden), layer),
        v=weights.matrix("v", (spec.kv_size, hidden), layer),
        o=weights.matrix("o", (hidden, spec.q_size), layer),
    )


def load_attention(weights: Weights, spec: DecoderSpec, layer: int) -> Attention:
    """Plain attention."""
    return Attention(load_projections(weights, spec, layer))


def load_normed_attention(weights: Weights, spec: DecoderSpec, layer: int) -> NormedAttention:
    """Attention with norms on q and k (names: `weights.QK_NORM`)."""
    return NormedAttention(
        load_projections(weights, spec, layer),
        weights.vector("q_norm", spec.head_dim, layer),
        weights.vector("k_norm", spec.head_dim, layer),
    )


# ---- MLP


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    spec: DecoderSpec
    gate: Weight
    up: Weight
    down: Weight

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        gate, up = ops.linear(x, self.gate), ops.linear(x, self.up)
        return ops.linear(ops.glu(gate, up, self.spec.activation), self.down)


def load_mlp(weights: Weights, spec: DecoderSpec, layer: int) -> GatedMLP:
    """gate, up and down as separate matrices."""
    wide, narrow = spec.intermediate_size, spec.hidden_size
    return GatedMLP(
        spec,
        weights.matrix("gate", (wide, narrow), layer),
        weights.matrix("up", (wide, narrow), layer),
        weights.matrix("down", (narrow, wide), layer),
    )


# ---- block


@dataclass(frozen=True)
class PreNormBlock:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    eps: float
    attn_norm: Weight
    attention: AttentionPart
    ffn_norm: Weight
    mlp: GatedMLP

    def __call__(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        x = ops.add(x, self.attention(ops, batch, ops.rms_norm(x, self.attn_norm, self.eps)))
        return ops.add(x, self.mlp(ops, ops.rms_norm(x, self.ffn_norm, self.eps)))


def pre_norm(
    weights: Weights, spec: DecoderSpec, layer: int, attention: AttentionPart, mlp: GatedMLP
) -> PreNormBlock:
    """A pre-norm block around given parts."""
    return PreNormBlock(
        spec.rms_norm_eps,
        attn_norm=weights.vector("attn_norm", spec.hidden_size, layer),
        attention=attention,
        ffn_norm=weights.vector("ffn_norm", spec.hidden_size, layer),
        mlp=mlp,
    )
