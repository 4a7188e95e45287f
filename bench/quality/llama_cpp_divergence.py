"""Measures llama.cpp's own divergence from the float32 truth, and stores it as the bar to beat.

Truth is transformers in float32 on the weights that transformers dequantises from the same GGUF
file. llama.cpp runs as it does by default on a CPU (f16 KV cache, its own weight repacking) with
flash attention on. `measure.py` has the windows. headrace takes no part. Needs torch, transformers,
gguf and llama-cpp-python:

    python bench/quality/llama_cpp_divergence.py TEXT smollm2:135m=FILE gemma3:270m=FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
import transformers
from measure import WINDOW, Array, Logits, Sample, compare, file_digest, read_text, sample

PACKAGES = ("llama-cpp-python", "transformers", "torch", "gguf")
STORED = Path(__file__).parents[2] / "tests/models/goldens/llama_cpp_divergence.json"


def open_llama(path: Path, num_threads: int) -> llama_cpp.Llama:
    """llama.cpp with one window as context."""
    return llama_cpp.Llama(
        model_path=str(path),
        n_ctx=WINDOW + 12,
        n_batch=WINDOW + 12,
        n_ubatch=WINDOW + 12,
        n_threads=num_threads,
        n_threads_batch=num_threads,
        flash_attn=True,
        logits_all=True,
        verbose=False,
    )


def llama_sample(model: llama_cpp.Llama, text: str) -> Sample:
    """Windows by llama.cpp's tokenizer and its rule for the beginning token."""
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    adds_bos = llama_cpp.llama_vocab_get_add_bos(vocab)
    ids = model.tokenize(text.encode(), add_bos=False, special=False)
    return sample(ids, model.token_bos() if adds_bos else None)


def llama_logits(model: llama_cpp.Llama) -> Logits:
    """One window in one batch, from an empty cache."""

    def run(window: list[int]) -> Array:
        model.reset()
        model.eval(window)
        return np.array(model.scores[: len(window)], np.float32)

    return run


def true_logits(path: Path) -> Logits:
    """transformers, float32, plain attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def run(window: list[int]) -> Array:
        with torch.no_grad():
            logits = model(torch.tensor([window]), use_cache=False).logits[0]
        rows: Array = logits.float().numpy()
        return rows

    return run


def measure(path: Path, text: str, num_threads: int) -> dict[str, Any]:
    """The figures of one model."""
    model = open_llama(path, num_threads)
    cases = llama_sample(model, text)
    figures = compare(cases, true_logits(path), llama_logits(model))
    return {"file_sha256": file_digest(path), "tokens_sha256": cases.digest} | figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    text = read_text(options.text)
    stored: dict[str, Any] = {
        "text": {"name": options.text.name, "sha256": file_digest(options.text)},
        "versions": {name: version(name) for name in PACKAGES},
        "llama_cpp_system": llama_cpp.llama_print_system_info().decode(),
        "command": "python bench/quality/llama_cpp_divergence.py TEXT NAME=FILE...",
        "models": {},
    }
    for argument in options.models:
        name, _, file = argument.partition("=")
        print(name, flush=True)
        stored["models"][name] = measure(Path(file), text, options.threads)
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    json.dump(stored, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
