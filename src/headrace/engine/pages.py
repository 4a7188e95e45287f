"""KV page ids and how many sequences use each: integers only, no memory behind them. PURE.

A page is a fixed run of token positions in every layer's pool; the backend owns the bytes, this
file owns the numbers. A page is free (count 0, on the list), used (count > 0), or idle (count 0 but
kept by the prefix cache, see `prefix.py`). Nothing here knows tokens, jobs or time.
"""

from __future__ import annotations


class PagePool:
    """Counts of `num_pages` pages. `take` and `free` move a page between the list and a user."""

    __slots__ = ("_free", "counts", "num_pages")

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, "a pool needs pages"
        self.num_pages = num_pages
        self.counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # lowest id first out

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    def take(self) -> int | None:
        """A free page with count 1, or None when the list is empty."""
        if not self._free:
            return None
        page = self._free.pop()
        assert self.counts[page] == 0, f"free page {page} is in use"
        self.counts[page] = 1
        return page

    def share(self, page: int) -> int:
        """One user more; returns how many there were."""
        before = self.counts[page]
        self.counts[page] = before + 1
        return before

    def drop(self, page: int) -> int:
        """One user less; returns how many are left. At 0 the caller frees it or keeps it idle."""
        left = self.counts[page] - 1
        assert left >= 0, f"page {page} dropped more often than taken"
        self.counts[page] = left
        return left

    def free(self, page: int) -> None:
        """Back on the list; nobody may use it."""
        assert self.counts[page] == 0, f"page {page} freed while in use"
        self._free.append(page)

    def free_pages(self) -> tuple[int, ...]:
        """The free list, for invariant checks."""
        return tuple(self._free)
