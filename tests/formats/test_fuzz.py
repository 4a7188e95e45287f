"""A few hundred damaged files of each format: only `FormatError` may escape. See `fuzz.py`."""

from __future__ import annotations

from pathlib import Path

import fuzz
import numpy as np
import pytest

NUM_CASES = 600


@pytest.mark.parametrize("at", [0, 1], ids=["gguf", "safetensors"])
def test_damaged_files_only_raise_format_errors(tmp_path: Path, at: int) -> None:
    _, reader, data, header_bytes = fuzz.samples(tmp_path)[at]
    assert fuzz.attempt(reader, tmp_path / "case", data), "the undamaged file is good"
    accepted = 0
    for seed in range(NUM_CASES):
        damaged = fuzz.mutate(data, np.random.default_rng((1, seed)), header_bytes)
        accepted += fuzz.attempt(reader, tmp_path / "case", damaged)
    assert accepted < NUM_CASES / 2, "most damage is noticed"
