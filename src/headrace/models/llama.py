"""Llama 1 to 3, Mistral, SmolLM2, SmolLM3: the plain pre-norm decoder with grouped queries.

A block is x += attention(norm(x)); x += mlp(norm(x)). GGUF files of "llama" and "smollm3" hold Q
and K with rows permuted so that rotary pairs are neighbours, hence `interleaved` there and not in
config.json's dialect. SmolLM3 leaves every fourth layer without positions.
Source: Llama (arXiv 2302.13971, 2407.21783), Mistral (2310.06825), RoPE to NoPE (2501.18795);
transformers 5 `modeling_llama`, `modeling_mistral`, `modeling_smollm3` for key defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.backends.ops import Batch, Ops, Rope, Tensor, Weight
from headrace.models.decoder import (
    Decoder,
    GatedMLP,
    attention_spec,
    heads,
    load_head,
    load_mlp,
    rotate,
)
from headrace.models.family import (
    GGUF_HARMLESS,
    HF_HARMLESS,
    MAX_LAYERS,
    Family,
    Source,
    gguf_rope_of,
    gguf_spec,
    hf_spec,
    hf_windows,
    uniform,
)
from headrace.models.rope import MAX_CONTEXT, hf_rope, hf_rope_table
from headrace.models.spec import DecoderSpec, LayerSpec
from headrace.models.weights import COMMON, Weights


@dataclass(frozen=True)
class LlamaBlock:
    """One layer. **Shapes** x [T, hidden_size]."""

    spec: DecoderSpec
    layer: int
    attn_norm: Weight
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    ffn_norm: Weight
    mlp: GatedMLP

    def __call__(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        eps = self.spec.rms_norm_eps
        x = ops.add(x, self.attention(ops, batch, ops.rms_norm(x, self.attn_norm, eps)))
        return ops.add(x, self.mlp(ops, ops.rms_norm(x, self.ffn_norm, eps), self.spec))

    def attention(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        """Grouped-query attention with rotary positions."""
        q = heads(ops, ops.linear(x, self.q), self.spec)
        k = heads(ops, ops.linear(x, self.k), self.spec)
        v = heads(ops, ops.linear(x, self.v), self.spec)
        q, k = rotate(ops, batch, q, k, self.spec, self.layer)
        mixed = ops.paged_attention(q, k, v, batch, attention_spec(self.spec, self.layer))
        return ops.linear(mixed, self.o)


def build(architecture: str, spec: DecoderSpec, weights: Weights, max_context: int) -> Decoder:
    """Weights into blocks."""
    embedding, head = load_head(weights, spec)
    blocks = tuple(_block(spec, weights, layer) for layer in range(spec.num_layers))
    norm = weights.vector("norm", spec.hidden_size)
    return Decoder(
        architecture, spec, embedding, blocks, norm, head, weights.num_bytes, max_context
    )


def _block(spec: DecoderSpec, weights: Weights, layer: int) -> LlamaBlock:
    hidden = spec.hidden_size
    return LlamaBlock(
        spec,
        layer,
        attn_norm=weights.vector("attn_norm", hidden, layer),
        q=weights.matrix("q", (spec.q_size, hidden), layer),
        k=weights.matrix("k", (spec.kv_size, hidden), layer),
        v=weights.matrix("v", (spec.kv_size, hidden), layer),
        o=weights.matrix("o", (hidden, spec.q_size), layer),
        ffn_norm=weights.vector("ffn_norm", hidden, layer),
        mlp=load_mlp(weights, spec, layer),
    )


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
    rope = _hf_rope(source, spec, 10000.0)
    source.keys.finish(HF_HARMLESS)
    return uniform(spec, rope, 0)


def read_hf_mistral(source: Source) -> DecoderSpec:
    """`mistral`: a window on every layer; 4096 when config.json does not speak of it."""
    spec = _hf_plain(source)
    window = _hf_window(source, 4096)
    windows = hf_windows(source.keys, window, [window > 0] * spec.num_layers)
    rope = _hf_rope(source, spec, 10000.0)
    source.keys.finish(HF_HARMLESS)
    return uniform(spec, rope, windows)


def _hf_plain(source: Source) -> DecoderSpec:
    spec = hf_spec(source, "silu")
    source.keys.expect("hidden_act", "silu", "swish")
    source.keys.expect("attention_bias", False)
    source.keys.expect("mlp_bias", False)
    return spec


def _hf_rope(source: Source, spec: DecoderSpec, theta: float) -> Rope:
    table, theta = hf_rope_table(source.keys, theta)
    return hf_rope(table, theta, source.rope_inputs(spec))


def _hf_window(source: Source, default: int) -> int:
    if source.keys.says_null("sliding_window"):
        default = 0
    return source.keys.integer("sliding_window", 0, MAX_CONTEXT, default)


# ---- SmolLM3: every fourth layer without rope


def read_gguf_smollm3(source: Source) -> DecoderSpec:
    """`smollm3`: the interval is not in the file; it is 4."""
    spec = read_gguf(source)
    return _without_rope(spec, [(layer + 1) % 4 == 0 for layer in range(spec.num_layers)])


def read_hf_smollm3(source: Source) -> DecoderSpec:
    """`smollm3`: `no_rope_layers` has 0 where a layer has no rope."""
    spec = _hf_plain(source)
    keys = source.keys
    interval = keys.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
    has_rope = keys.choices("no_rope_layers", spec.num_layers, (0, 1))
    if has_rope is None:
        has_rope = tuple((layer + 1) % interval for layer in range(spec.num_layers))
    use_window = keys.flag("use_sliding_window", False)
    stated = _hf_window(source, 0)
    window = stated if use_window else 0
    windows = hf_windows(keys, window, [window > 0 and not flag for flag in has_rope])
    rope = _hf_rope(source, spec, 2000000.0)
    keys.finish(HF_HARMLESS)
    return _without_rope(uniform(spec, rope, windows), [not flag for flag in has_rope])


def _without_rope(spec: DecoderSpec, without: list[bool]) -> DecoderSpec:
    layers = tuple(
        LayerSpec(None if bare else layer.rope, layer.window)
        for layer, bare in zip(spec.layers, without, strict=True)
    )
    return replace(spec, layers=layers)


FAMILIES = (
    Family("llama", "gguf", COMMON, read_gguf, build),
    Family("llama", "hf", COMMON, read_hf_llama, build),
    Family("mistral", "hf", COMMON, read_hf_mistral, build),
    Family("smollm3", "gguf", COMMON, read_gguf_smollm3, build),
    Family("smollm3", "hf", COMMON, read_hf_smollm3, build),
)
