"""Makes block_goldens.npz: random stored blocks of every kind and their float32 values.

Not a test. The values come from the PyPI package `gguf` (its numpy dequantiser), an independent
implementation; run this only to remake the file: `python tests/formats/make_goldens.py`.
Bytes are random, except that float16 scales are made small and finite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

NUM_BYTES_OF_SCALES = {  # byte offsets of float16 scales inside a block
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
KINDS = ("F32", "F16", "BF16", "MXFP4", *NUM_BYTES_OF_SCALES)


def random_rows(kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Two rows of 256 elements."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (2, 256 // elements, size), dtype=np.uint8)
    if elements == 1:
        values = rng.standard_normal((2, 256)).astype(np.float32)
        return np.asarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(2, -1)
    for at in NUM_BYTES_OF_SCALES.get(kind.name, ()):
        scales = (rng.standard_normal(raw.shape[:2]) * 0.02).astype("<f2")
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(2, -1)


def main() -> None:
    """Write the file beside this script."""
    rng = np.random.default_rng(20240607)
    arrays: dict[str, NDArray[np.generic]] = {}
    for name in KINDS:
        kind = gguf.GGMLQuantizationType[name]
        raw = random_rows(kind, rng)
        typed: NDArray[Any] = raw.view(np.float16) if name == "F16" else raw
        typed = raw.view(np.float32) if name == "F32" else typed
        arrays[f"{name}.raw"] = raw.reshape(-1)
        arrays[f"{name}.values"] = gguf.quants.dequantize(typed, kind).astype(np.float32)
        assert arrays[f"{name}.values"].shape == (2, 256)
    np.savez_compressed(Path(__file__).with_name("block_goldens.npz"), allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
