"""Find the tokens that match as whole texts, before any merging: control and user-defined ones.

Leftmost match first, the longest at each place (llama.cpp takes the longest of the whole text
first; the two differ only where such tokens overlap). The texts become one regular expression
shaped like a trie, so that thousands of them cost no more per character than a few.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.errors import FormatError, InvalidRequest


class Splitter:
    """Cuts text at the given token texts. `eats_space`: white space right after one belongs to
    it (Phi-3 marks its tokens so)."""

    def __init__(self, tokens: Mapping[str, int], eats_space: frozenset[int] = frozenset()) -> None:
        self._tokens = tokens
        self._eats_space = eats_space
        self._pattern = _compile(tokens) if tokens else None

    def split(self, text: str) -> Iterator[str | int]:
        """Ids of the tokens found and the non-empty texts between them, in order."""
        if self._pattern is None:
            if text:
                yield text
            return
        start = 0
        while match := self._pattern.search(text, start):
            if match.start() > start:
                yield text[start : match.start()]
            token_id = self._tokens[match[0]]
            yield token_id
            start = match.end()
            if token_id in self._eats_space:
                start = _skip_space(text, start)
        if start < len(text):
            yield text[start:]


class Breaker:
    """Puts a sentinel character into texts that spell one of `tokens`, after the first character
    of each place where one begins, and behind a text that ends with the start of one (what comes
    after it might add the rest)."""

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = set(tokens)
        self._pattern = _compile(texts) if texts else None
        self._sorted = sorted(texts)
        self._first = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts), default=0)
        self._single = frozenset(text for text in texts if len(text) == 1)

    def apply(self, text: str, sentinel: str) -> str:
        """`text` in which no token is spelt. **Raises** `InvalidRequest` for a token of a single
        character, which cannot be broken up."""
        if self._pattern is None:
            return text
        if not self._single.isdisjoint(text):
            raise InvalidRequest("a message holds a character that is a special token by itself")
        parts: list[str] = []
        start = 0
        while match := self._pattern.search(text, start):
            parts += (text[start : match.start() + 1], sentinel)
            start = match.start() + 1
        broken = "".join(parts) + text[start:]
        return broken + sentinel if self._is_open(text) else broken

    def _is_open(self, text: str) -> bool:
        """Whether `text` ends with the start of a token that goes on."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start] in self._first:
                tail = text[start:]
                i = bisect.bisect_right(self._sorted, tail)
                if i < len(self._sorted) and self._sorted[i].startswith(tail):
                    return True
        return False


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _compile(texts: Iterable[str]) -> re.Pattern[str]:
    try:
        return re.compile(trie_pattern(texts))
    except (RecursionError, OverflowError, re.error):
        raise FormatError(
            "the vocabulary's special or user-defined tokens are too deeply nested: hundreds of "
            "them start with one another"
        ) from None


def trie_pattern(texts: Iterable[str]) -> str:
    """A regular expression that matches the longest of `texts` at a place.

    **Source** The usual trie-to-regex construction: common starts are shared, endings optional.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _render(root)


def _render(root: dict[str, Any]) -> str:
    """Pattern of a trie, built without recursion: a piece may be thousands of characters long."""
    done: dict[int, str] = {}
    stack = [(root, False)]
    while stack:
        node, is_ready = stack.pop()
        if not is_ready:
            stack.append((node, True))
            stack.extend((child, False) for char, child in node.items() if char)
            continue
        branches = [re.escape(char) + done[id(child)] for char, child in node.items() if char]
        if not branches:
            done[id(node)] = ""
        elif len(branches) == 1 and "" not in node:
            done[id(node)] = branches[0]
        else:
            done[id(node)] = f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")
    return done[id(root)]
