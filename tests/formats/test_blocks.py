"""Block kinds against stored goldens of the `gguf` package, sizes, and encode-decode bounds.

Goldens: `make_goldens.py`. Error bounds follow from the step of each kind, not from our output.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.formats import blocks

GOLDENS = Path(__file__).with_name("block_goldens.npz")

# Largest error over the largest magnitude of a group, for values of both signs: half a step of
# the quants, plus what the rounding of scales adds (float16, or 4 to 6 bits in k-quants).
RELATIVE_ERROR = {
    "F32": 0.0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q4_0": 1 / 8 + 0.002,  # the far side of an asymmetric grid: 7 of 8 steps
    "Q4_1": 2 / 30 + 0.002,
    "Q5_0": 1 / 16 + 0.002,
    "Q5_1": 2 / 62 + 0.002,
    "Q8_0": 1 / 254 + 0.002,
    "Q2_K": 1 / 2,
    "Q3_K": 1 / 3,
    "Q4_K": 1 / 8,
    "Q5_K": 1 / 14,
    "Q6_K": 1 / 24,
    "IQ4_NL": 1 / 8 + 0.002,  # the table ends at 113 of 127; its widest gap is 24
    "IQ4_XS": 1 / 6,
    "MXFP4": 1 / 4,  # 6 to 8 saturates to 6
}


@pytest.fixture(scope="module")
def goldens() -> dict[str, NDArray[np.generic]]:
    with np.load(GOLDENS) as stored:
        return {name: stored[name] for name in stored.files}


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_decode_agrees_bit_for_bit_with_the_gguf_package(
    kind: str, goldens: dict[str, NDArray[np.generic]]
) -> None:
    raw = goldens[f"{kind}.raw"].astype(np.uint8)
    decoded = blocks.decode(kind, raw, (2, 256))
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, goldens[f"{kind}.values"])


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_decoding_in_chunks_equals_decoding_blocks_alone(
    kind: str, goldens: dict[str, NDArray[np.generic]]
) -> None:
    raw = np.tile(goldens[f"{kind}.raw"].astype(np.uint8), 300)  # more than two chunks
    decoded = blocks.decode(kind, raw, (300, 2, 256))
    assert (decoded == goldens[f"{kind}.values"]).all()


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_encoded_values_come_back_within_the_step_of_the_kind(kind: str) -> None:
    x = np.random.default_rng(1).standard_normal((16, 512)).astype(np.float32)
    data = blocks.encode(kind, x)
    assert data.size == blocks.num_bytes(kind, x.shape)
    error = np.abs(blocks.decode(kind, data, x.shape) - x).reshape(-1, 256).max(axis=1)
    assert (error <= RELATIVE_ERROR[kind] * np.abs(x).reshape(-1, 256).max(axis=1)).all()


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_zeros_stay_zeros(kind: str) -> None:
    x = np.zeros((3, 256), np.float32)
    assert not blocks.decode(kind, blocks.encode(kind, x), x.shape).any()


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(blocks.KINDS)),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-60, 14),
)
def test_encoding_what_was_decoded_loses_no_more_than_a_step(
    kind: str, seed: int, exponent: int
) -> None:
    x = np.random.default_rng(seed).uniform(-1, 1, (2, 256)).astype(np.float32) * 2.0**exponent
    x = x.astype(np.float32)
    decoded = blocks.decode(kind, blocks.encode(kind, x), x.shape)
    assert np.isfinite(decoded).all()
    largest = float(np.abs(x).max())
    # Below the smallest float16 scale everything may round to zero.
    assert np.abs(decoded - x).max() <= max(largest * (RELATIVE_ERROR[kind] + 0.01), 2.0**-14)


def test_infinite_scale_decodes_without_warnings() -> None:
    raw = np.zeros(18, np.uint8)
    raw[:2] = np.array([np.inf], "<f2").view(np.uint8)
    assert not np.isfinite(blocks.decode("Q4_0", raw, (32,))).any()


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [("F32", (), 4), ("F32", (0, 3), 0), ("Q4_1", (576, 1536), 552_960), ("Q6_K", (256,), 210)],
)
def test_num_bytes(kind: str, shape: tuple[int, ...], expected: int) -> None:
    assert blocks.num_bytes(kind, shape) == expected


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("Q4_K", (4, 576), ("576", "Q4_K", "256")),
        ("Q4_0", (), ("1", "Q4_0")),
        ("F32", (-1,), ("negative",)),
        ("IQ1_S", (256,), ("IQ1_S", "Q4_K")),
    ],
)
def test_num_bytes_refuses(kind: str, shape: tuple[int, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(FormatError) as caught:
        blocks.num_bytes(kind, shape)
    assert all(word in caught.value.message for word in words)


def test_decode_refuses_data_of_the_wrong_length() -> None:
    with pytest.raises(FormatError, match="36 bytes, got 35"):
        blocks.decode("Q4_0", np.zeros(35, np.uint8), (64,))


def test_encode_refuses_infinite_values_for_quantised_kinds_only() -> None:
    x = np.full(256, np.inf, np.float32)
    with pytest.raises(FormatError, match="Q8_0 cannot hold"):
        blocks.encode("Q8_0", x)
    assert np.isinf(blocks.decode("BF16", blocks.encode("BF16", x), (256,))).all()


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001], np.uint32)
    stored = blocks.encode("BF16", bits.view(np.float32)).view("<u2")
    assert stored.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FC0]
