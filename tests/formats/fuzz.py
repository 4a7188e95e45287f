"""Fuzzes the readers: damaged files may only raise `FormatError`, soon and without much memory.

`test_fuzz.py` runs a few hundred cases; for more: `python tests/formats/fuzz.py --seconds 600`.
A failing case is written to the current folder, with the seed that made it.
"""

from __future__ import annotations

import argparse
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import raw_safetensors

from headrace.errors import FormatError
from headrace.formats import blocks, gguf, safetensors
from headrace.types import StoredTensor

Reader = Callable[[Path], object]

# Numbers that break sums and comparisons: signs, powers of two, and their neighbours.
AWKWARD = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
SLOW_SECONDS = 2.0


def gguf_sample(folder: Path) -> bytes:
    """A small file with a value of every type and a tensor of several kinds."""
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": np.uint16(2),
        "llama.eps": 1e-5,
        "llama.wide": np.float64(1),
        "llama.flag": True,
        "llama.flags": [True, False],
        "llama.heads": np.array([4, 2], np.uint64),
        "tokenizer.ggml.tokens": ["<s>", "▁a", "", "é" * 9],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
    }
    tensors = []
    for number, kind in enumerate(("F32", "Q4_1", "Q6_K", "BF16")):
        shape = (2, 256)
        data = np.full(blocks.num_bytes(kind, shape), number, np.uint8)
        tensors.append(StoredTensor(f"blk.{number}.weight", kind, shape, data))
    gguf.write_gguf(folder / "sample.gguf", metadata, tensors)
    return (folder / "sample.gguf").read_bytes()


def mutate(data: bytes, rng: np.random.Generator, header_bytes: int) -> bytes:
    """One to four changes, mostly inside the header: flips, awkward numbers, cuts, splices."""
    raw = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, max(1, min(header_bytes, len(raw)))))
        change = int(rng.integers(0, 5))
        if change == 0:
            raw[at : at + 1] = bytes([int(rng.integers(0, 256))])
        elif change == 1:
            number = AWKWARD[int(rng.integers(0, len(AWKWARD)))]
            raw[at : at + 8] = struct.pack("<Q", number)
        elif change == 2:
            raw[at : at + 4] = struct.pack("<I", AWKWARD[int(rng.integers(0, 5))])
        elif change == 3:
            del raw[at : at + int(rng.integers(1, 40))]
        else:
            piece = raw[at : at + int(rng.integers(1, 40))]
            raw[at:at] = piece
    if rng.integers(0, 8) == 0:
        del raw[int(rng.integers(0, len(raw) + 1)) :]
    return bytes(raw)


def attempt(reader: Reader, path: Path, data: bytes) -> bool:
    """Whether a damaged file was still accepted. Anything but `FormatError` escapes."""
    path.write_bytes(data)
    try:
        reader(path)
    except FormatError:
        return False
    return True


def samples(folder: Path) -> list[tuple[str, Reader, bytes, int]]:
    """Name, reader, good bytes and header size of each format."""
    sample = gguf_sample(folder)
    return [
        ("gguf", gguf.open_gguf, sample, len(sample) - 3000),
        ("safetensors", safetensors.read_safetensors, raw_safetensors.GOOD, 230),
    ]


def fuzz(seconds: float, seed: int) -> int:
    """Number of failures found in about `seconds`."""
    failures = cases = accepted = 0
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        formats = samples(Path(folder))
        while time.monotonic() < deadline:
            name, reader, data, header_bytes = formats[cases % len(formats)]
            damaged = mutate(data, np.random.default_rng((seed, cases)), header_bytes)
            start = time.monotonic()
            try:
                accepted += attempt(reader, Path(folder) / "case", damaged)
                assert time.monotonic() - start < SLOW_SECONDS, "too slow"
            except Exception:  # the point of the program: whatever escapes is a finding
                failures += 1
                traceback.print_exc()
                Path(f"fuzz-{name}-{seed}-{cases}").write_bytes(damaged)
            cases += 1
    print(f"{cases} cases, {accepted} accepted, {failures} failures (seed {seed})")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    raise SystemExit(1 if fuzz(options.seconds, options.seed) else 0)


if __name__ == "__main__":
    main()
