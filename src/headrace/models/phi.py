"""Phi-3, Phi-3.5 and Phi-4: Llama's block, stored with q, k, v fused and gate and up fused.

The fused matrices are cut by rows when loaded (quantised rows are whole blocks), so nothing fused
remains at run time. Part of a head may turn (Phi-4-mini), and long-context files bring longrope:
its short or long factors are chosen once, by the context the model is loaded for (`max_context`),
where transformers switches by the length of each text. So one text has one answer.
Source: Phi-3 (arXiv 2404.14219), LongRoPE (2402.13753); transformers 5 `configuration_phi3`.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.errors import FormatError
from headrace.models.decoder import Block
from headrace.models.family import (
    GGUF_HARMLESS,
    HF_HARMLESS,
    Family,
    Source,
    gguf_rope_of,
    gguf_spec,
    hf_spec,
    hf_window,
    uniform,
)
from headrace.models.layers import Attention, GatedMLP, Projections, pre_norm
from headrace.models.rope import MAX_CONTEXT, RopeInputs, hf_rope, hf_rope_table
from headrace.models.spec import DecoderSpec
from headrace.models.weights import COMMON, Names, Weights

NAMES = {
    **COMMON,
    "qkv": Names("blk.{i}.attn_qkv.weight", "model.layers.{i}.self_attn.qkv_proj.weight"),
    "gate_up": Names("blk.{i}.ffn_up.weight", "model.layers.{i}.mlp.gate_up_proj.weight"),
}


def block(weights: Weights, spec: DecoderSpec, layer: int) -> Block:
    """Pre-norm, plain attention, gated MLP, from fused matrices."""
    hidden, q_size, kv_size = spec.hidden_size, spec.q_size, spec.kv_size
    q, k, v = weights.rows("qkv", hidden, layer, (q_size, kv_size, kv_size))
    gate, up = weights.rows("gate_up", hidden, layer, (spec.intermediate_size,) * 2)
    o = weights.matrix("o", (hidden, q_size), layer)
    down = weights.matrix("down", (hidden, spec.intermediate_size), layer)
    attention = Attention(Projections(spec, layer, q, k, v, o))
    return pre_norm(weights, spec, layer, attention, GatedMLP(spec, gate, up, down))


# ---- readers


def read_gguf(source: Source) -> DecoderSpec:
    """`phi3`."""
    spec = gguf_spec(source, "silu")
    rope = gguf_rope_of(source, source.rope_inputs(spec))
    window = source.keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    source.keys.finish(GGUF_HARMLESS)
    return uniform(spec, rope, window)


def read_hf(source: Source) -> DecoderSpec:
    """`phi3`: a window on every layer when there is one."""
    spec = hf_spec(source, "silu")
    keys = source.keys
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)
    keys.expect("lm_head_bias", False)
    keys.expect("full_attn_mod", 1)  # Phi-4-mini: every layer attends in full
    keys.expect("interpolate_factor", 1)
    window = hf_window(keys, 0)
    original = keys.integer("original_max_position_embeddings", 2, MAX_CONTEXT, 4096)
    table, theta = hf_rope_table(keys, 10000.0)
    part = keys.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    part = table.number("partial_rotary_factor", 0.0, 1.0, part)
    rope = hf_rope(table, theta, _inputs(source, spec, part, original))
    keys.finish(HF_HARMLESS)
    return uniform(spec, rope, window)


def _inputs(source: Source, spec: DecoderSpec, part: float, original: int) -> RopeInputs:
    rotary_dim = int(spec.head_dim * part)
    if rotary_dim < 2 or rotary_dim % 2:
        raise FormatError(
            f"{source.keys.name('partial_rotary_factor')} of heads of {spec.head_dim} turns "
            f"{rotary_dim} elements; it must be an even number above 0"
        )
    inputs = source.rope_inputs(spec)
    return replace(inputs, rotary_dim=rotary_dim, original_context=original)


FAMILIES = (
    Family("phi3", "gguf", NAMES, read_gguf, block),
    Family("phi3", "hf", NAMES, read_hf, block),
)
