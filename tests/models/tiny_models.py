"""Tiny random checkpoints of every family, in both dialects, made from a seed by numpy alone.

`CASES` holds a config.json per case (written the way published models write it) with sizes small
enough for a test and special values large enough to matter: caps that bite, windows shorter than
the prompts, biases and norms away from 0 and 1. `hf_checkpoint` makes the Hugging Face form,
`write_gguf_form` the GGUF form of the same weights. Nothing here uses headrace's readers, so a
wrong name or key there cannot hide.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.formats.gguf_writer import write_gguf
from headrace.types import Checkpoint, StoredTensor

Array = NDArray[np.float32]
Config = Mapping[str, Any]

SIZES: Config = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA: Config = {
    **SIZES,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
}
MISTRAL: Config = {
    **SIZES,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "head_dim": 24,
    "sliding_window": 8,
}
SMOLLM3: Config = {
    **SIZES,
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_act": "silu",
    "num_hidden_layers": 5,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0, 1],
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
QWEN2: Config = {
    **SIZES,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "sliding_window": 8,
    "use_sliding_window": False,
    "max_window_layers": 1,
    "rope_theta": 1000000.0,
}
QWEN3: Config = {
    **SIZES,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "head_dim": 32,
    "attention_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 3,
    "tie_word_embeddings": True,
}
PHI3: Config = {
    **SIZES,
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "hidden_act": "silu",
    "sliding_window": 9,
    "original_max_position_embeddings": 128,
    "rope_scaling": None,
}
PHI3_LONG: Config = {
    **PHI3,
    "sliding_window": None,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 24,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
    },
}
GEMMA2: Config = {
    **SIZES,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.5,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
GEMMA3: Config = {
    **SIZES,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 24,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window": 8,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CASES: Mapping[str, Config] = {
    "llama": LLAMA,
    "llama_tied": {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama3": {**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "llama_linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_yarn": {**LLAMA, "rope_scaling": YARN},
    "mistral": MISTRAL,
    "mistral_full": {**MISTRAL, "sliding_window": None},
    "smollm3": SMOLLM3,
    "smollm3_window": {**SMOLLM3, "sliding_window": 8, "use_sliding_window": True},
    "qwen2": QWEN2,
    "qwen2_window": {**QWEN2, "use_sliding_window": True},
    "qwen3": QWEN3,
    "qwen3_yarn": {**QWEN3, "rope_scaling": YARN},
    "phi3": PHI3,
    "phi3_short": PHI3_LONG,
    "phi3_long": PHI3_LONG,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_scaled": {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}

# GGUF has no keys for these families' windows.
GGUF_CASES = tuple(case for case in CASES if case not in ("smollm3_window", "qwen2_window"))

# longrope: transformers switches factors by the length of the text, headrace by `max_context`.
MAX_CONTEXT = {"phi3_short": 24, "phi3_long": 128}
PROMPT_LENGTHS = {"phi3_short": (24, 7), "phi3_long": (40, 25)}


def prompts(case: str) -> list[NDArray[np.int32]]:
    """The case's prompts: one past every window, one shorter."""
    rng = np.random.default_rng(zlib.crc32(f"prompts of {case}".encode()))
    lengths = PROMPT_LENGTHS.get(case, (40, 7))
    return [rng.integers(0, SIZES["vocab_size"], length, dtype=np.int32) for length in lengths]


# ---- Hugging Face form


def head_dim(config: Config) -> int:
    """Stated, or hidden size over heads."""
    return int(config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors, by the name after `model.layers.N.`."""
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q, kv = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    kind = config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.down_proj.weight": (hidden, wide),
    }
    if kind == "phi3":
        shapes["self_attn.qkv_proj.weight"] = (q + 2 * kv, hidden)
        shapes["mlp.gate_up_proj.weight"] = (2 * wide, hidden)
    else:
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"self_attn.{name}_proj.weight"] = (size, hidden)
            if kind == "qwen2":
                shapes[f"self_attn.{name}_proj.bias"] = (size,)
        shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"] = (wide, hidden)
    if kind in ("qwen3", "gemma3_text"):
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (dim,)
    if kind in ("gemma2", "gemma3_text"):
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
        shapes["post_feedforward_layernorm.weight"] = (hidden,)
    return shapes


def weights(case: str) -> dict[str, Array]:
    """All tensors by Hugging Face name: matrices normal with variance 2 / inputs, norms around 1
    (around 0 for Gemma, which adds 1), biases of half a unit."""
    config = CASES[case]
    rng = np.random.default_rng(zlib.crc32(f"weights of {case}".encode()))
    table = (config["vocab_size"], config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config["hidden_size"],)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    center = 0.0 if config["model_type"].startswith("gemma") else 1.0
    tensors: dict[str, Array] = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = center + 0.3 * values
        elif name.endswith("bias"):
            values = 0.5 * values
        else:
            values = values * np.sqrt(2 / shape[-1])
        tensors[name] = values.astype(np.float32)
    return tensors


def stored(tensors: Mapping[str, Array]) -> dict[str, StoredTensor]:
    """As a file would hold them."""
    return {
        name: StoredTensor(name, "F32", x.shape, np.ascontiguousarray(x).reshape(-1).view(np.uint8))
        for name, x in tensors.items()
    }


def hf_checkpoint(case: str, **overrides: Any) -> Checkpoint:
    """The case as an opened Hugging Face folder; `overrides` replace config keys."""
    return Checkpoint(case, "hf", {**CASES[case], **overrides}, stored(weights(case)))


# ---- GGUF form

GGUF_ARCHITECTURE = {"mistral": "llama", "gemma3_text": "gemma3"}
PERMUTED = ("llama", "mistral", "smollm3")  # families whose converter makes rotary pairs neighbours
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str, config: Config) -> str:
    """What llama.cpp's converter calls a tensor."""
    tops = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in tops:
        return tops[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, kind = rest.rsplit(".", 1)
    short = GGUF_NAMES[stem]
    if stem == "post_attention_layernorm" and config["model_type"].startswith("gemma"):
        short = "post_attention_norm"
    return f"blk.{layer}.{short}.{kind}"


def permute(x: Array, num_heads: int) -> Array:
    """Rows of each head from (first half, second half) to pairs."""
    halves = x.reshape(num_heads, 2, -1, *x.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(x.shape)


def gguf_tensors(case: str) -> dict[str, Array]:
    """The case's tensors as the converter would write them."""
    config = CASES[case]
    kind = config["model_type"]
    tensors: dict[str, Array] = {}
    for name, x in weights(case).items():
        if kind in PERMUTED and "q_proj" in name:
            x = permute(x, config["num_attention_heads"])
        if kind in PERMUTED and "k_proj" in name:
            x = permute(x, config["num_key_value_heads"])
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            x = x + np.float32(1)
        tensors[gguf_name(name, config)] = x
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    for which in ("short", "long"):
        if f"{which}_factor" in scaling:
            factors = np.array(scaling[f"{which}_factor"], np.float32)
            tensors[f"rope_factors_{which}.weight"] = factors
    return tensors


def llama3_factors(config: Config) -> Array:
    """By what Llama 3 divides each frequency, as the converter computes it."""
    scaling = config["rope_scaling"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(0, head_dim(config), 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / head_dim(config))
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def gguf_metadata(case: str) -> dict[str, Any]:
    """The case's configuration as the converter would write it."""
    config = CASES[case]
    arch = GGUF_ARCHITECTURE.get(config["model_type"], config["model_type"])
    dim = head_dim(config)
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.dimension_count": int(dim * config.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(config["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if arch in ("llama", "phi3", "gemma2", "gemma3") and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(cap):
            keys[cap] = config[cap]
    keys |= gguf_scaling(config)
    metadata = {f"{arch}.{key}": value for key, value in keys.items()}
    return {"general.architecture": arch, "general.name": case, **metadata}


def gguf_scaling(config: Config) -> dict[str, Any]:
    """Keys of rope scaling."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("type", scaling.get("rope_type"))
    keys: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        keys = {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if kind == "yarn":
        original = scaling["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(stretch) / np.log(original)))
    return keys


def write_gguf_form(case: str, path: Path) -> None:
    """The case as a GGUF file."""
    write_gguf(path, gguf_metadata(case), stored(gguf_tensors(case)).values())
