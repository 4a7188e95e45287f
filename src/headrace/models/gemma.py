"""Gemma 2 and Gemma 3 (text): norms on both sides of each part, windowed and full layers mixed.

A block is x += norm(attention(norm(x))); x += norm(mlp(norm(x))), embeddings are scaled by
sqrt(hidden_size), and the head is the embedding. Gemma 2 caps attention scores and logits by tanh
and alternates windowed and full layers; Gemma 3 norms q and k instead, has one full layer in six,
and another rope base for the windowed ones. The Hugging Face dialect stores norm weights minus 1;
GGUF's converter has added it.
Source: Gemma 2 (arXiv 2408.00118), Gemma 3 (2503.19786); transformers 5
`configuration_{gemma2,gemma3}`; llama.cpp's loader for what GGUF files leave unsaid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.backends.ops import Batch, Ops, Rope, Tensor, Weight
from headrace.errors import UnsupportedModel
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
from headrace.models.keys import Keys
from headrace.models.layers import (
    AttentionPart,
    GatedMLP,
    load_attention,
    load_mlp,
    load_normed_attention,
)
from headrace.models.rope import (
    MAX_CONTEXT,
    MAX_THETA,
    MIN_THETA,
    RopeInputs,
    hf_rope,
    hf_whole_rope,
    plain,
)
from headrace.models.spec import DecoderSpec, LayerSpec
from headrace.models.weights import COMMON, QK_NORM, Names, Weights

MAX_SOFTCAP = 1e6
MAX_QUERY_SCALAR = 1e6

GEMMA2_NAMES = {
    **COMMON,
    "norm": replace(COMMON["norm"], hf_offset=1.0),
    "attn_norm": replace(COMMON["attn_norm"], hf_offset=1.0),
    "attn_post_norm": Names(
        "blk.{i}.post_attention_norm.weight",
        "model.layers.{i}.post_attention_layernorm.weight",
        hf_offset=1.0,
    ),
    "ffn_norm": Names(
        "blk.{i}.ffn_norm.weight",
        "model.layers.{i}.pre_feedforward_layernorm.weight",
        hf_offset=1.0,
    ),
    "ffn_post_norm": Names(
        "blk.{i}.post_ffw_norm.weight",
        "model.layers.{i}.post_feedforward_layernorm.weight",
        hf_offset=1.0,
    ),
}
GEMMA3_NAMES = {
    **GEMMA2_NAMES,
    **{key: replace(names, hf_offset=1.0) for key, names in QK_NORM.items()},
}


@dataclass(frozen=True)
class SandwichBlock:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    eps: float
    attn_norm: Weight
    attention: AttentionPart
    attn_post_norm: Weight
    ffn_norm: Weight
    mlp: GatedMLP
    ffn_post_norm: Weight

    def __call__(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        y = self.attention(ops, batch, ops.rms_norm(x, self.attn_norm, self.eps))
        x = ops.add(x, ops.rms_norm(y, self.attn_post_norm, self.eps))
        y = self.mlp(ops, ops.rms_norm(x, self.ffn_norm, self.eps))
        return ops.add(x, ops.rms_norm(y, self.ffn_post_norm, self.eps))


def gemma2_block(weights: Weights, spec: DecoderSpec, layer: int) -> Block:
    """Plain attention between norms."""
    return _sandwich(weights, spec, layer, load_attention(weights, spec, layer))


def gemma3_block(weights: Weights, spec: DecoderSpec, layer: int) -> Block:
    """Attention with q and k norms between norms."""
    return _sandwich(weights, spec, layer, load_normed_attention(weights, spec, layer))


def _sandwich(weights: Weights, spec: DecoderSpec, layer: int, attention: AttentionPart) -> Block:
    return SandwichBlock(
        spec.rms_norm_eps,
        attn_norm=weights.vector("attn_norm", spec.hidden_size, layer),
        attention=attention,
        attn_post_norm=weights.vector("attn_post_norm", spec.hidden_size, layer),
        ffn_norm=weights.vector("ffn_norm", spec.hidden_size, layer),
        mlp=load_mlp(weights, spec, layer),
        ffn_post_norm=weights.vector("ffn_post_norm", spec.hidden_size, layer),
    )


# ---- GGUF


def read_gguf_gemma2(source: Source) -> DecoderSpec:
    """`gemma2`. The file does not say how queries are scaled: the 27B model (46 layers) by its
    hidden size per head, the others by their head size."""
    spec = _gguf(source, wide_query_layers=46, softcaps=(50.0, 30.0))
    rope = gguf_rope_of(source, source.rope_inputs(spec))
    window = source.keys.integer("attention.sliding_window", 1, MAX_CONTEXT, 4096)
    source.keys.finish(GGUF_HARMLESS)
    return uniform(spec, rope, _alternate(spec, window, 2))


def read_gguf_gemma3(source: Source) -> DecoderSpec:
    """`gemma3`: as above with 62 layers for the 27B model. Rope scaling is the full layers'."""
    spec = _gguf(source, wide_query_layers=62, softcaps=(0.0, 0.0))
    keys = source.keys
    inputs = source.rope_inputs(spec)
    full = gguf_rope_of(source, inputs)
    theta = keys.number("rope.freq_base_swa", MIN_THETA, MAX_THETA, 10000.0)
    local = Rope(tuple(plain(theta, inputs.rotary_dim).tolist()), interleaved=False)
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    windows = _gguf_windows(keys, spec, window)
    keys.finish(GGUF_HARMLESS)
    return _two_ropes(spec, windows, full, local)


def _gguf(source: Source, wide_query_layers: int, softcaps: tuple[float, float]) -> DecoderSpec:
    spec = gguf_spec(source, "gelu_tanh")
    keys = source.keys
    attention = keys.number("attn_logit_softcapping", 0.0, MAX_SOFTCAP, softcaps[0])
    final = keys.number("final_logit_softcapping", 0.0, MAX_SOFTCAP, softcaps[1])
    is_wide = spec.num_layers == wide_query_layers
    scalar = spec.hidden_size // spec.num_heads if is_wide else spec.head_dim
    return _gemma(spec, float(scalar), attention, final)


def _gguf_windows(keys: Keys, spec: DecoderSpec, window: int) -> tuple[int, ...]:
    """`sliding_window_pattern` is a period, or one flag per layer; 6 when not there."""
    pattern = "attention.sliding_window_pattern"
    if hasattr(keys.raw(pattern), "__len__"):
        flags = keys.choices(pattern, spec.num_layers, (True, False)) or ()
        return tuple(window if flag else 0 for flag in flags)
    return _alternate(spec, window, keys.integer(pattern, 1, MAX_LAYERS, 6))


# ---- Hugging Face


def read_hf_gemma2(source: Source) -> DecoderSpec:
    """`gemma2`."""
    spec = _hf(source, softcaps=(50.0, 30.0))
    keys = source.keys
    rope = hf_whole_rope(keys, 10000.0, source.rope_inputs(spec))
    window = hf_window(keys, 4096)
    windows = hf_windows(keys, window, [w > 0 for w in _alternate(spec, window, 2)])
    keys.finish(HF_HARMLESS)
    return uniform(spec, rope, windows)


def read_hf_gemma3(source: Source) -> DecoderSpec:
    """`gemma3_text`."""
    spec = _hf(source, softcaps=(0.0, 0.0))
    keys = source.keys
    full, local = _hf_ropes(keys, source.rope_inputs(spec))
    window = hf_window(keys, 4096)
    old = keys.integer("_sliding_window_pattern", 1, MAX_LAYERS, 6)
    period = keys.integer("sliding_window_pattern", 1, MAX_LAYERS, old)
    windows = hf_windows(keys, window, [w > 0 for w in _alternate(spec, window, period)])
    keys.finish(HF_HARMLESS)
    return _two_ropes(spec, windows, full, local)


def refuse_hf_multimodal(source: Source) -> DecoderSpec:
    """`gemma3` with a vision tower: not yet."""
    raise UnsupportedModel(
        f"{source.checkpoint.path}: model_type 'gemma3' holds a vision model too, which is not "
        "supported; use a text-only folder (model_type 'gemma3_text') or a GGUF file"
    )


def _hf(source: Source, softcaps: tuple[float, float]) -> DecoderSpec:
    spec = hf_spec(source, "gelu_tanh", default_head_dim=256)
    keys = source.keys
    keys.expect("hidden_activation", "gelu_pytorch_tanh")
    keys.expect("hidden_act", "gelu_pytorch_tanh")
    keys.expect("attention_bias", False)
    keys.expect("use_bidirectional_attention", False)
    scalar = keys.number("query_pre_attn_scalar", 1e-3, MAX_QUERY_SCALAR, 256.0)
    attention = _hf_softcap(keys, "attn_logit_softcapping", softcaps[0])
    final = _hf_softcap(keys, "final_logit_softcapping", softcaps[1])
    return _gemma(spec, scalar, attention, final)


def _hf_softcap(keys: Keys, key: str, default: float) -> float:
    """A cap; null switches it off."""
    return keys.number(key, 0.0, MAX_SOFTCAP, 0.0 if keys.says_null(key) else default)


def _hf_ropes(keys: Keys, inputs: RopeInputs) -> tuple[Rope, Rope]:
    """Ropes of the full and of the windowed layers: two tables in `rope_parameters`
    (transformers 5), or `rope_theta`, `rope_scaling` and `rope_local_base_freq` (before)."""
    both = keys.table("rope_parameters")
    local_theta = keys.number("rope_local_base_freq", MIN_THETA, MAX_THETA, 10000.0)
    if both is None:
        full = hf_whole_rope(keys, 1000000.0, inputs)
        return full, Rope(tuple(plain(local_theta, inputs.rotary_dim).tolist()), False)
    ropes = []
    for layer_type, theta in (("full_attention", 1000000.0), ("sliding_attention", local_theta)):
        table = both.table(layer_type) or Keys({}, "", keys.name(layer_type))
        theta = table.number("rope_theta", MIN_THETA, MAX_THETA, theta)
        ropes.append(hf_rope(table, theta, inputs))
    both.finish()
    return ropes[0], ropes[1]


# ---- both


def _gemma(spec: DecoderSpec, scalar: float, attention: float, final: float) -> DecoderSpec:
    return replace(
        spec,
        attention_scale=scalar**-0.5,
        attention_softcap=attention,
        final_softcap=final,
        embedding_scale=float(spec.hidden_size) ** 0.5,
    )


def _alternate(spec: DecoderSpec, window: int, period: int) -> tuple[int, ...]:
    """Every `period`-th layer is full, the others are windowed."""
    return tuple(window if (i + 1) % period else 0 for i in range(spec.num_layers))


def _two_ropes(spec: DecoderSpec, windows: tuple[int, ...], full: Rope, local: Rope) -> DecoderSpec:
    layers = tuple(LayerSpec(local if window else full, window) for window in windows)
    return replace(spec, layers=layers)


FAMILIES = (
    Family("gemma2", "gguf", GEMMA2_NAMES, read_gguf_gemma2, gemma2_block),
    Family("gemma2", "hf", GEMMA2_NAMES, read_hf_gemma2, gemma2_block),
    Family("gemma3", "gguf", GEMMA3_NAMES, read_gguf_gemma3, gemma3_block),
    Family("gemma3_text", "hf", GEMMA3_NAMES, read_hf_gemma3, gemma3_block),
    Family("gemma3", "hf", GEMMA3_NAMES, refuse_hf_multimodal, gemma3_block),
)
