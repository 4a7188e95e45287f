"""Token ids to text, a few at a time, and stop strings in the result.

Both hold back what may still change: `Detokenizer` an unfinished UTF-8 sequence, `StopStrings` a
tail that may grow into a stop string. Their concatenated output does not depend on how the input
was cut. UTF-8 decoding is the standard library's incremental decoder (invalid bytes become U+FFFD
exactly as in a decode of the whole).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from headrace.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one sequence. Control tokens give no text.

    `at_start` False (the default): the ids continue a prompt, and a space the first token carries
    is part of the text. True: they are a whole text, and a SentencePiece vocabulary's added space
    is dropped; then everything pushed and flushed equals `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = at_start and tokenizer.strips_space

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is now certain; may be empty."""
        return self._decoder.decode(b"".join(map(self._bytes, token_ids)))

    def flush(self) -> str:
        """The rest, when no more ids come; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(token_id)
        if self._drops_space and not self._tokenizer.is_control(token_id):
            self._drops_space = False
            return data.removeprefix(b" ")
        return data


class StopStrings:
    """Passes text on until one of `stops` appears in it.

    The stop string that is complete first wins; of those that end at the same character, the
    longest. Its text and what follows are not given out. Matching works across tokens and pushes
    and costs the same per character however long the strings are (Knuth, Morris, Pratt 1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere; refuse it earlier"
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to give out, the stop string that matched or None). After a match: ("", it)."""
        if self.matched is not None:
            return "", self.matched
        if not self._matchers:
            return text, None
        for i, char in enumerate(text):
            self.matched = self._advance(char)
            if self.matched is not None:
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen[: -len(self.matched)], self.matched
        seen = self._held + text
        keep = max(matcher.length for matcher in self._matchers)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _advance(self, char: str) -> str | None:
        complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
        return complete[0] if complete else None


class _Matcher:
    """How much of the start of `stop` the text seen so far ends with: `length` characters."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = _fallbacks(stop)

    def advance(self, char: str) -> bool:
        """Takes one character; True when `stop` is complete (then nothing more may come)."""
        while self.length and self.stop[self.length] != char:
            self.length = self._fallback[self.length - 1]
        if self.stop[self.length] == char:
            self.length += 1
        return self.length == len(self.stop)


def _fallbacks(stop: str) -> list[int]:
    """For each start of `stop`: the length of its longest proper start that is also its end."""
    lengths = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = lengths[length - 1]
        if stop[i] == stop[length]:
            length += 1
        lengths[i] = length
    return lengths
