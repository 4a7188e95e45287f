"""Prefix cache: a tree whose edges are the tokens of one full page. PURE.

A node stands for "these tokens, after that parent"; it names the page that holds their keys and
values. Children are found in a dict keyed by the page's token ids, so a hit compares real tokens:
a hash collision can cost time, never an answer. Pages nobody uses stay idle until they are needed,
least recently used first.

Eviction takes leaves first without searching for them. A sequence always holds a whole path from
the root and releases it deepest page first, so in the idle order a parent stands behind its
children. `publish` keeps that true: a sequence that computed a page which the tree already has
gives its own copy back and uses the tree's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from headrace.engine.pages import PagePool

Key = tuple[int, ...]


class Node:
    """One cached page. `page` is -1 at the root."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: Node | None, key: Key, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[Key, Node] = {}


class PrefixCache:
    """Hands out pages of `pool`, finds cached prefixes, evicts. With `is_enabled` False it caches
    nothing."""

    def __init__(self, pool: PagePool, page_size: int, *, is_enabled: bool = True) -> None:
        assert page_size > 0, "a page holds tokens"
        self.pool = pool
        self.page_size = page_size
        self.is_enabled = is_enabled
        self.root = Node(None, (), -1)
        self.num_evicted = 0
        self._nodes: dict[int, Node] = {}  # page -> node
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unused, oldest first

    @property
    def num_available(self) -> int:
        """Pages that `take` could hand out now."""
        return self.pool.num_free + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages the tree holds, used or idle."""
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Cached pages that nobody uses."""
        return len(self._idle)

    def take(self) -> int | None:
        """A page with one user, evicting the least recently used leaf if none is free."""
        page = self.pool.take()
        if page is None and self._idle:
            self._evict()
            page = self.pool.take()
        return page

    def match(self, tokens: list[int], limit: int) -> tuple[Node, list[int]]:
        """The deepest node whose path spells whole pages of `tokens[:limit]`, and the pages."""
        node, size = self.root, self.page_size
        pages: list[int] = []
        if not self.is_enabled:
            return node, pages
        for start in range(0, limit - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
            pages.append(child.page)
        return node, pages

    def share(self, pages: Iterable[int]) -> None:
        """Use cached pages (a path from the root)."""
        for page in pages:
            if self.pool.share(page) == 0:
                del self._idle[page]

    def release(self, pages: list[int]) -> None:
        """Give a sequence's pages back, deepest first; cached ones become idle, others free."""
        for page in reversed(pages):
            if self.pool.drop(page) == 0:
                if page in self._nodes:
                    self._idle[page] = None
                else:
                    self.pool.free(page)

    def publish(self, parent: Node, key: Key, page: int) -> Node:
        """Offer a fully computed page to later sequences.

        If the tree has these tokens already, `page` is freed and the caller holds the returned
        node's page instead (equal contents: same tokens, same prefix).
        """
        node = parent.children.get(key)
        if node is None:
            node = Node(parent, key, page)
            parent.children[key] = node
            self._nodes[page] = node
            return node
        assert node.page != page, f"page {page} published twice"
        self.share((node.page,))
        self.release([page])
        return node

    def clear(self) -> None:
        """Evict every idle page."""
        while self._idle:
            self._evict()

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        node = self._nodes.pop(page)
        assert not node.children, f"page {page} evicted before its children"
        assert node.parent is not None
        del node.parent.children[node.key]
        self.num_evicted += 1
        self.pool.free(page)

    def check(self, owners: Iterable[list[int]]) -> None:
        """Assert that free, idle and owned pages are all pages, and counts equal owners.

        O(pages): for tests and after a failed step.
        """
        counts = [0] * self.pool.num_pages
        for pages in owners:
            assert len(set(pages)) == len(pages), "a sequence holds a page twice"
            for page in pages:
                counts[page] += 1
        assert counts == self.pool.counts, "page counts differ from owners"
        free = set(self.pool.free_pages())
        assert len(free) == self.pool.num_free, "a page is on the free list twice"
        for page, count in enumerate(counts):
            places = (count > 0) + (page in free) + (page in self._idle)
            assert places == 1, f"page {page} is in {places} places"
        for page, node in self._nodes.items():
            assert node.page == page
            assert node.parent is not None
            assert node.parent.children.get(node.key) is node, "a node lost its parent"
            assert node.parent is self.root or self._nodes.get(node.parent.page) is node.parent
            assert page not in free, "a cached page is on the free list"
