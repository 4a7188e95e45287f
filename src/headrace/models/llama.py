"""Llama 1 to 3, Mistral, SmolLM2, SmolLM3: the plain pre-norm decoder with grouped queries.

GGUF files of "llama" and "smollm3" hold Q and K with rows permuted so that rotary pairs are
neighbours, hence `interleaved` there and not in config.json's dialect. SmolLM3 leaves every fourth
layer without positions.
Source: Llama (arXiv 2302.13971, 2407.21783), Mistral (2310.06825), RoPE to NoPE (2501.18795);
transformers 5 `configuration_{llama,mistral,smollm3}` for key defaults.
"""

from __future__ import annotations

from dataclasses import replace

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
from headrace.models.layers import load_attention, load_mlp, pre_norm
from headrace.models.rope import MAX_CONTEXT, hf_whole_rope
from headrace.models.spec import DecoderSpec
from headrace.models.weights import COMMON, Weights


def block(weights: Weights, spec: DecoderSpec, layer: int) -> Block:
    """Pre-norm, plain attention, gated MLP."""
    attention = load_attention(weights, spec, layer)
    return pre_norm(weights, spec, layer, attention, load_mlp(weights, spec, layer))


# ---- readers


def read_gguf(source: Source) -> DecoderSpec:
    """`llama`: also Mistral and SmolLM2 files. A window is honoured when the file states one."""
    spec = gguf_spec(source, "silu")
    rope = gguf_rope_of(source, source.rope_inputs(spec, interleaved=True))
    window = source.keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    source.keys.finish(GGUF_HARMLESS)
    return uniform(spec, rope, window)


def read_hf_llama(source: Source) -> DecoderSpec:
    """`llama`: no biases."""
    spec = _hf_plain(source)
    source.keys.expect("rope_interleaved", False)
    rope = hf_whole_rope(source.keys, 10000.0, source.rope_inputs(spec))
    source.keys.finish(HF_HARMLESS)
    return uniform(spec, rope, 0)


def read_hf_mistral(source: Source) -> DecoderSpec:
    """`mistral`: a window on every layer; 4096 when config.json does not speak of it."""
    spec = _hf_plain(source)
    window = hf_window(source.keys, 4096)
    rope = hf_whole_rope(source.keys, 10000.0, source.rope_inputs(spec))
    source.keys.finish(HF_HARMLESS)
    return uniform(spec, rope, window)


def _hf_plain(source: Source) -> DecoderSpec:
    spec = hf_spec(source, "silu")
    source.keys.expect("hidden_act", "silu", "swish")
    source.keys.expect("attention_bias", False)
    source.keys.expect("mlp_bias", False)
    return spec


# ---- SmolLM3: some layers without rope


def read_gguf_smollm3(source: Source) -> DecoderSpec:
    """`smollm3`: every fourth layer; the interval is not in the file."""
    spec = read_gguf(source)
    return _keep_rope(spec, [(layer + 1) % 4 != 0 for layer in range(spec.num_layers)])


def read_hf_smollm3(source: Source) -> DecoderSpec:
    """`smollm3`: `no_rope_layers` has 0 where a layer has no rope; such layers may be windowed."""
    spec = _hf_plain(source)
    keys = source.keys
    interval = keys.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
    stated = keys.choices("no_rope_layers", spec.num_layers, (0, 1))
    every = [(layer + 1) % interval != 0 for layer in range(spec.num_layers)]
    has_rope = every if stated is None else [bool(flag) for flag in stated]
    window = hf_window(keys, 0)
    if not keys.flag("use_sliding_window", False):
        window = 0
    windows = hf_windows(keys, window, [window > 0 and not flag for flag in has_rope])
    rope = hf_whole_rope(keys, 2000000.0, source.rope_inputs(spec))
    keys.finish(HF_HARMLESS | {"max_window_layers"})  # written, but SmolLM3 has no use for it
    return _keep_rope(uniform(spec, rope, windows), has_rope)


def _keep_rope(spec: DecoderSpec, has_rope: list[bool]) -> DecoderSpec:
    pairs = zip(spec.layers, has_rope, strict=True)
    return replace(spec, layers=tuple(x if has else replace(x, rope=None) for x, has in pairs))


FAMILIES = (
    Family("llama", "gguf", COMMON, read_gguf, block),
    Family("llama", "hf", COMMON, read_hf_llama, block),
    Family("mistral", "hf", COMMON, read_hf_mistral, block),
    Family("smollm3", "gguf", COMMON, read_gguf_smollm3, block),
    Family("smollm3", "hf", COMMON, read_hf_smollm3, block),
)
