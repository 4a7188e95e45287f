"""Compares the reference backend with every stored golden and prints the figures.

Not a test: the whole of what `test_real_models.py` samples, ten prompts of 5 to 600 tokens per real
model, in a minute or two each. Run `PYTHONPATH=src python tests/models/check_goldens.py
smollm2:135m=FILE gemma3:270m=FILE`; without arguments only the tiny families are compared.
Exits with 1 when a figure is above the tolerance.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import digests
import running
import tiny_models

from headrace.backends.reference import ReferenceOps
from headrace.formats.checkpoint import open_checkpoint
from headrace.models import load_model


def main() -> int:
    worst = check_tiny()
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        worst = max(worst, check_real(name, Path(path)))
    print(f"worst {worst:.2e}, tolerance {running.TOLERANCE:.0e}")
    return int(worst > running.TOLERANCE)


def check_tiny() -> float:
    """Every family in both dialects."""
    worst = 0.0
    for case in tiny_models.CASES:
        errors = {"hf": digests.tiny_error(tiny_models.hf_checkpoint(case), case)}
        if case in tiny_models.GGUF_CASES:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "tiny.gguf"
                tiny_models.write_gguf_form(case, path)
                errors["gguf"] = digests.tiny_error(open_checkpoint(path), case)
        print(f"{case:16}", *(f"{dialect} {error:.2e}" for dialect, error in errors.items()))
        worst = max(worst, *errors.values())
    return worst


def check_real(name: str, path: Path) -> float:
    """Ten prompts of a real model."""
    ops = ReferenceOps(batch_invariant=False)
    model = load_model(open_checkpoint(path), ops)
    worst = 0.0
    for digest in digests.load(name):
        start = time.perf_counter()
        error = digests.real_error(model, digest, ops)
        seconds = time.perf_counter() - start
        print(f"{name} {len(digest.tokens):4} tokens: {error:.2e} ({seconds:.1f} s)", flush=True)
        worst = max(worst, error)
    return worst


if __name__ == "__main__":
    sys.exit(main())
