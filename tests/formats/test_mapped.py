"""Mapped files: what `forget` gives back and what it must leave alone."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from headrace.formats.mapped import forget, map_file

PAGES = 64


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process holds, by /proc/self/smaps."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and not line.split(" ")[0].endswith(":"):
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_forgotten_pages_leave_memory_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    data = np.arange(PAGES * mmap.PAGESIZE, dtype=np.uint32).astype(np.uint8)
    path.write_bytes(data.tobytes())
    view = map_file(path)[100:]
    assert np.array_equal(view, data[100:])
    assert resident(path) == PAGES * mmap.PAGESIZE
    forget(view)
    assert resident(path) == mmap.PAGESIZE  # the first page is not the view's alone
    assert np.array_equal(view, data[100:])


def test_memory_that_is_no_mapping_is_left_alone() -> None:
    data = np.full(8 * mmap.PAGESIZE, 7, np.uint8)
    forget(data[5:])
    forget(np.frombuffer(data.tobytes(), np.uint8))
    assert np.all(data == 7)
