"""A Llama of two layers whose tokens are the 256 bytes, as a GGUF file: loads in a moment, complete
with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace.formats import blocks
from headrace.formats.gguf_writer import write_gguf
from headrace.text.bytelevel import BYTE_OF_CHAR
from headrace.types import StoredTensor

LAYERS, HIDDEN, WIDE, KV, VOCAB, CONTEXT = 2, 64, 96, 32, 257, 256
LAYER_SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV, HIDDEN),
    "attn_v": (KV, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (WIDE, HIDDEN),
    "ffn_up": (WIDE, HIDDEN),
    "ffn_down": (HIDDEN, WIDE),
}


def matrix_shapes() -> dict[str, tuple[int, int]]:
    """What one token multiplies with; the embedding is the head."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes


def write_small_model(path: Path) -> None:
    """Matrices Q8_0, norms float32."""
    rng = np.random.default_rng(0)
    tensors = []
    for name, shape in matrix_shapes().items():
        values = (rng.standard_normal(shape) / 8).astype(np.float32)
        tensors.append(StoredTensor(name, "Q8_0", shape, blocks.encode("Q8_0", values)))
    norms = [f"blk.{i}.{name}.weight" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in [*norms, "output_norm.weight"]:
        ones = np.ones(HIDDEN, np.float32).view(np.uint8)
        tensors.append(StoredTensor(name, "F32", (HIDDEN,), ones))
    write_gguf(path, _metadata(), tensors)


def _metadata() -> dict[str, Any]:
    keys = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": WIDE,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
        "vocab_size": VOCAB,
    }
    tokenizer = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*BYTE_OF_CHAR, "<eos>"],
        "token_type": [1] * 256 + [3],
        "merges": [],
        "eos_token_id": 256,
        "add_bos_token": False,
    }
    return {
        "general.architecture": "llama",
        **{f"llama.{name}": value for name, value in keys.items()},
        **{f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()},
    }
