"""Qwen2 and Qwen3: Llama's block with biases on q, k and v (2), or norms on q and k instead (3).

Qwen3 states its head size apart from hidden size / heads. Neither dialect permutes Q and K.
Source: Qwen2 (arXiv 2407.10671), Qwen3 (2505.09388); transformers 5 `configuration_{qwen2,qwen3}`.
"""

from __future__ import annotations

from headrace.backends.ops import Rope
from headrace.models.decoder import Block
from headrace.models.family import (
    GGUF_HARMLESS,
    HF_HARMLESS,
    MAX_LAYERS,
    Family,
    Source,
    gguf_rope_of,
    gguf_spec,
    hf_spec,
    hf_window,
    hf_windows,
    uniform,
)
from headrace.models.layers import (
    BiasedAttention,
    load_mlp,
    load_normed_attention,
    load_projections,
    pre_norm,
)
from headrace.models.rope import hf_whole_rope
from headrace.models.spec import DecoderSpec
from headrace.models.weights import COMMON, QK_NORM, Names, Weights

QWEN2_NAMES = {
    **COMMON,
    "q_bias": Names("blk.{i}.attn_q.bias", "model.layers.{i}.self_attn.q_proj.bias"),
    "k_bias": Names("blk.{i}.attn_k.bias", "model.layers.{i}.self_attn.k_proj.bias"),
    "v_bias": Names("blk.{i}.attn_v.bias", "model.layers.{i}.self_attn.v_proj.bias"),
}
QWEN3_NAMES = {**COMMON, **QK_NORM}


def qwen2_block(weights: Weights, spec: DecoderSpec, layer: int) -> Block:
    """Pre-norm, attention with biases, gated MLP."""
    attention = BiasedAttention(
        load_projections(weights, spec, layer),
        weights.vector("q_bias", spec.q_size, layer),
        weights.vector("k_bias", spec.kv_size, layer),
        weights.vector("v_bias", spec.kv_size, layer),
    )
    return pre_norm(weights, spec, layer, attention, load_mlp(weights, spec, layer))


def qwen3_block(weights: Weights, spec: DecoderSpec, layer: int) -> Block:
    """Pre-norm, attention with q and k norms, gated MLP."""
    attention = load_normed_attention(weights, spec, layer)
    return pre_norm(weights, spec, layer, attention, load_mlp(weights, spec, layer))


# ---- readers


def read_gguf(source: Source) -> DecoderSpec:
    """`qwen2` and `qwen3`."""
    spec = gguf_spec(source, "silu")
    rope = gguf_rope_of(source, source.rope_inputs(spec))
    source.keys.finish(GGUF_HARMLESS)
    return uniform(spec, rope, 0)


def read_hf_qwen2(source: Source) -> DecoderSpec:
    """`qwen2`: biases are not optional."""
    return _hf(source, hf_spec(source, "silu"))


def read_hf_qwen3(source: Source) -> DecoderSpec:
    """`qwen3`: no biases; heads of 128 when config.json does not say."""
    source.keys.expect("attention_bias", False)
    return _hf(source, hf_spec(source, "silu", default_head_dim=128))


def _hf(source: Source, spec: DecoderSpec) -> DecoderSpec:
    keys = source.keys
    keys.expect("hidden_act", "silu")
    keys.expect("use_mrope", False)
    rope: Rope = hf_whole_rope(keys, 10000.0, source.rope_inputs(spec))
    window = hf_window(keys, 4096)
    first = keys.integer("max_window_layers", 0, MAX_LAYERS, 28)
    if not keys.flag("use_sliding_window", False):
        window = 0
    sliding = [window > 0 and layer >= first for layer in range(spec.num_layers)]
    windows = hf_windows(keys, window, sliding)
    keys.finish(HF_HARMLESS)
    return uniform(spec, rope, windows)


FAMILIES = (
    Family("qwen2", "gguf", QWEN2_NAMES, read_gguf, qwen2_block),
    Family("qwen2", "hf", QWEN2_NAMES, read_hf_qwen2, qwen2_block),
    Family("qwen3", "gguf", QWEN3_NAMES, read_gguf, qwen3_block),
    Family("qwen3", "hf", QWEN3_NAMES, read_hf_qwen3, qwen3_block),
)
