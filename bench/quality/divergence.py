"""Holds the cpu backend's divergence from float32 against llama.cpp's stored figures.

Truth is the `reference` backend with a float32 cache, which the tests hold to transformers at 1e-4.
The backend under test has the engine's default f16 cache and takes each window in chunks of 512
with every row wanted. `measure.py` has the windows. Exit status 1 when the mean KL divergence is
above llama.cpp's or arg-max agreement below 97%:

    python bench/quality/divergence.py TEXT smollm2:135m=FILE gemma3:270m=FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
from measure import WINDOW, Array, Logits, Sample, compare, file_digest, read_text, sample

from headrace.backends.cpu import CpuOps
from headrace.backends.ops import PAGE_SIZE, Limits, Ops, StepArrays
from headrace.backends.reference import ReferenceOps
from headrace.formats.checkpoint import open_checkpoint
from headrace.models import load_model
from headrace.text.tokenizer import load_tokenizer
from headrace.types import Checkpoint

STORED = Path(__file__).parents[2] / "tests/models/goldens/llama_cpp_divergence.json"
LEAST_AGREEMENT = 0.97
CHUNK = 512
CONTEXT = 512
assert CONTEXT > WINDOW, "a window and its beginning token must fit"


def chunk_arrays(window: list[int], start: int, stop: int) -> StepArrays:
    """One sequence's tokens start:stop, all rows wanted, on pages 0, 1, 2..."""
    return StepArrays(
        token_ids=np.array(window[start:stop], np.int32),
        positions=np.arange(start, stop, dtype=np.int32),
        cu_seqlens=np.array([0, stop - start], np.int32),
        context_lens=np.array([stop], np.int32),
        page_table=np.arange(CONTEXT // PAGE_SIZE, dtype=np.int32)[None],
        rows=np.arange(stop - start, dtype=np.int32),
    )


def backend_logits(
    checkpoint: Checkpoint, ops: Ops, dtype: Literal["f16", "f32"], chunk: int = CHUNK
) -> Logits:
    """A window's logits, by chunks. Every window reuses the same pages."""
    model = load_model(checkpoint, ops)
    pool = ops.kv_pool(model.kv_spec(CONTEXT // PAGE_SIZE, dtype))
    run = ops.compile(model.forward, pool, Limits(chunk, 1, chunk, CONTEXT))

    def logits(window: list[int]) -> Array:
        parts = [
            run(chunk_arrays(window, start, min(start + chunk, len(window)))).copy()
            for start in range(0, len(window), chunk)
        ]
        return np.concatenate(parts)

    return logits


def our_sample(checkpoint: Checkpoint, text: str) -> Sample:
    """Windows by headrace's tokenizer."""
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    return sample(ids, tokenizer.bos_id if tokenizer.add_bos else None)


def measure(path: Path, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model."""
    checkpoint = open_checkpoint(path)
    cases = our_sample(checkpoint, text)
    truth = backend_logits(checkpoint, ReferenceOps(batch_invariant=False), "f32")
    engine = backend_logits(
        checkpoint, CpuOps(options.threads, options.isa), options.kv, options.chunk
    )
    figures = compare(cases, truth, engine)
    return {"file_sha256": file_digest(path), "tokens_sha256": cases.digest} | figures


def verdict(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether the floor is met; prints the comparison."""
    for key in ("file_sha256", "tokens_sha256"):
        assert ours[key] == theirs[key], f"{key} differs from the stored run"
    is_closer: bool = ours["kl_mean"] <= theirs["kl_mean"]
    agrees: bool = ours["argmax_agreement"] >= LEAST_AGREEMENT
    is_met = is_closer and agrees
    print(f"  {'':18} headrace    llama.cpp")
    for key in ("kl_mean", "kl_median", "kl_p99", "argmax_agreement"):
        print(f"  {key:18} {ours[key]:<11} {theirs[key]}")
    print(f"  floor {'met' if is_met else 'NOT met'}", flush=True)
    return is_met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--isa", default="", help="default: the widest this CPU has")
    parser.add_argument("--kv", choices=("f16", "f32"), default="f16")
    parser.add_argument("--chunk", type=int, default=CHUNK)
    options = parser.parse_args()
    text = read_text(options.text)
    stored = json.loads(STORED.read_text())["models"]
    results: list[bool] = []
    for argument in options.models:
        name, _, file = argument.partition("=")
        print(name, flush=True)
        results.append(verdict(measure(Path(file), text, options), stored[name]))
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
