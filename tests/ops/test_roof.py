"""The loops that measure the machine's roof do the work they are paid for: every word is read."""

from __future__ import annotations

import numpy as np
import pytest

from headrace import _native
from headrace.backends.cpu import CpuOps
from headrace.types import StoredTensor

ISAS = _native.available_isas()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("rows", [16, 48, 5200])  # the last: more than one chunk of 1 MiB
def test_read_sum_reads_every_word_once(isa: str, num_threads: int, rows: int) -> None:
    words = np.random.default_rng(1).integers(0, 2**32, (rows, 65), dtype=np.uint32)
    # an F32 panel holds the same words in another order, and 16 rows leave no padding
    stored = StoredTensor("w", "F32", words.shape, words.view(np.uint8).reshape(-1))
    ops = CpuOps(num_threads, isa)
    total = int(words.sum(dtype=np.uint64)) % 2**32
    assert ops.read_sum(ops.weight(stored)) == total


@pytest.mark.parametrize("isa", ISAS)
def test_peak_counts_the_operations_of_all_threads(isa: str) -> None:
    one, two = CpuOps(1, isa), CpuOps(2, isa)
    for is_int8 in (False, True):
        ops = one.peak(is_int8, 3200)
        assert ops > 0
        assert one.peak(is_int8, 6400) == 2 * ops
        assert two.peak(is_int8, 3200) == 2 * ops


def test_int8_counts_four_products_a_lane() -> None:
    """A 32-bit lane holds four int8 products, on every ISA."""
    ops = CpuOps(1)
    assert ops.peak(is_int8=True, rounds=3200) == 4 * ops.peak(is_int8=False, rounds=3200)


def test_peak_refuses_no_rounds() -> None:
    with pytest.raises(ValueError, match="rounds"):
        CpuOps(1).peak(is_int8=True, rounds=0)
