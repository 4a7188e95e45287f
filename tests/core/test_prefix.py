"""Pages and the prefix tree by themselves, against a model that is a plain dict."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.pages import PagePool
from headrace.engine.prefix import Node, PrefixCache

SIZE = 2


def compute(cache: PrefixCache, tokens: list[int]) -> tuple[list[int], int]:
    """Hold the pages of `tokens` (whole pages only), publishing each; returns them and the hits."""
    node, pages = cache.match(tokens, len(tokens))
    cache.share(pages)
    hits = len(pages)
    for start in range(hits * SIZE, len(tokens) - SIZE + 1, SIZE):
        page = cache.take()
        assert page is not None
        node = cache.publish(node, tuple(tokens[start : start + SIZE]), page)
        pages.append(node.page)
    return pages, hits


def make(num_pages: int, *, is_enabled: bool = True) -> PrefixCache:
    return PrefixCache(PagePool(num_pages), SIZE, is_enabled=is_enabled)


def test_a_hit_needs_equal_tokens_and_an_equal_prefix() -> None:
    cache = make(10)
    pages, _ = compute(cache, [1, 2, 3, 4])
    cache.release(pages)
    assert cache.match([1, 2, 3, 4, 9], 5)[1] == pages
    assert cache.match([1, 2, 3, 9], 4)[1] == pages[:1]
    assert cache.match([3, 4, 3, 4], 4)[1] == []
    assert cache.match([1, 2, 3, 4], 3)[1] == pages[:1], "beyond the limit"


def test_equal_hashes_are_not_equal_tokens() -> None:
    """hash(-1) == hash(-2) in CPython: a cache that trusted hashes would answer wrongly."""
    assert hash((-1, 5)) == hash((-2, 5))
    cache = make(4)
    pages, _ = compute(cache, [-1, 5])
    assert cache.match([-2, 5], 2)[1] == []
    cache.release(pages)


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = make(4)
    for tokens in ([1, 1, 2, 2], [1, 1, 3, 3], [4, 4]):
        cache.release(compute(cache, tokens)[0])
    cache.release(compute(cache, [1, 1, 2, 2])[0])  # used again: now younger than [4, 4]
    gone = []
    for _ in range(4):
        assert cache.take() is not None
        left = [t for t in ([1, 1, 3, 3], [4, 4], [1, 1, 2, 2], [1, 1]) if whole(cache, t)]
        gone.append(left)
    assert gone == [
        [[4, 4], [1, 1, 2, 2], [1, 1]],
        [[1, 1, 2, 2], [1, 1]],
        [[1, 1]],
        [],
    ]


def whole(cache: PrefixCache, tokens: list[int]) -> bool:
    return len(cache.match(tokens, len(tokens))[1]) * SIZE == len(tokens)


def test_a_page_computed_twice_is_kept_once() -> None:
    cache = make(6)
    first, _ = compute(cache, [1, 2])
    copy = cache.take()
    assert copy is not None
    node = cache.publish(cache.root, (1, 2), copy)
    assert node.page == first[0]
    assert cache.pool.counts[first[0]] == 2
    assert cache.pool.num_free == 5


def test_disabled_finds_nothing() -> None:
    cache = make(4, is_enabled=False)
    assert cache.match([1, 2, 3, 4], 4) == (cache.root, [])


def test_our_own_bugs_are_assertions() -> None:
    pool = PagePool(1)
    page = pool.take()
    assert page == 0
    assert pool.take() is None
    with pytest.raises(AssertionError, match="freed while in use"):
        pool.free(page)
    pool.drop(page)
    with pytest.raises(AssertionError, match="more often"):
        pool.drop(page)
    cache = make(2)
    pages, _ = compute(cache, [1, 2])
    with pytest.raises(AssertionError, match="published twice"):
        cache.publish(cache.root, (1, 2), pages[0])


Tokens = st.lists(st.integers(0, 1), min_size=SIZE, max_size=10)
Action = st.one_of(Tokens, st.integers(0, 7))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(Action, max_size=40))
def test_any_life_keeps_counts_and_never_forgets_what_is_held(
    actions: list[list[int] | int],
) -> None:
    """A list computes and holds those tokens; a number releases one of the held sequences."""
    cache = make(8)
    held: list[tuple[list[int], list[int]]] = []
    for action in actions:
        if isinstance(action, int):
            if held:
                cache.release(held.pop(action % len(held))[1])
        else:
            tokens = action[: len(action) // SIZE * SIZE]
            if len(tokens) // SIZE <= cache.num_available:
                held.append((tokens, compute(cache, tokens)[0]))
        cache.check(pages for _, pages in held)
        for tokens, pages in held:
            assert cache.match(tokens, len(tokens))[1] == pages
            assert spelled(cache, tokens) == tokens
    for _, pages in held:
        cache.release(pages)
    cache.clear()
    assert cache.pool.num_free == 8


def spelled(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """The tokens on the path to a node."""
    node: Node | None = cache.match(tokens, len(tokens))[0]
    out: list[int] = []
    while node is not None:
        out = [*node.key, *out]
        node = node.parent
    return out
