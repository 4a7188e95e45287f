"""Incremental text: any chunking gives the text of the whole, and nothing given out changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import bpe_checkpoint, spm_checkpoint

from headrace.text.detokenizer import Detokenizer, StopStrings
from headrace.text.tokenizer import Tokenizer, load_tokenizer

BPE = load_tokenizer(bpe_checkpoint())
SPM = load_tokenizer(spm_checkpoint())
BOTH = pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
IDS = st.lists(st.integers(0, 399), max_size=40)  # random ids: mostly invalid UTF-8
CUTS = st.lists(st.integers(0, 40), max_size=10)


def spans(length: int, cuts: list[int]) -> list[slice]:
    """A whole of `length` cut at the given places."""
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    return [slice(start, end) for start, end in pairwise(edges)]


@BOTH
@given(ids=IDS, cuts=CUTS)
@settings(max_examples=300, deadline=None)
def test_any_chunking_gives_the_one_shot_decode(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer, at_start=True)
    text = (
        "".join(detokenizer.push(ids[span]) for span in spans(len(ids), cuts)) + detokenizer.flush()
    )
    assert text == tokenizer.decode(ids)


@BOTH
@given(text=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_valid_text_never_shows_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "").replace("▁", "")
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    detokenizer = Detokenizer(tokenizer, at_start=True)
    seen = ""
    for token_id in ids:
        seen += detokenizer.push((token_id,))
        assert text.startswith(seen)
    assert seen + detokenizer.flush() == text


def byte_ids(data: bytes) -> list[int]:
    """Ids of single bytes in the SentencePiece vocabulary."""
    return [next(i for i in range(420) if SPM.token_text(i) == f"<0x{b:02X}>") for b in data]


def test_an_unfinished_character_waits() -> None:
    detokenizer = Detokenizer(SPM)
    given_out = [detokenizer.push((i,)) for i in byte_ids("🙂".encode())]
    assert given_out == ["", "", "", "🙂"]
    assert detokenizer.flush() == ""


def test_invalid_bytes_become_replacements_once_certain() -> None:
    detokenizer = Detokenizer(SPM)
    assert detokenizer.push(byte_ids(b"\xf0\x9f")) == ""
    assert detokenizer.push(byte_ids(b"A")) == "\ufffdA"
    assert detokenizer.push(byte_ids(b"\xff")) == "\ufffd"
    assert detokenizer.push(byte_ids(b"\xe2\x82")) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_continuation_keeps_the_space_of_its_first_token() -> None:
    ids = SPM.encode("wheel", add_special=False, parse_special=False)
    assert Detokenizer(SPM).push(ids) == " wheel"
    assert Detokenizer(SPM, at_start=True).push(ids) == "wheel"
    assert Detokenizer(SPM, at_start=True).push([1, *ids]) == "wheel"  # a beginning token before


def test_control_tokens_give_no_text() -> None:
    assert Detokenizer(BPE).push([0, 1, 2]) == ""


# ---- stop strings
#

ALPHABET = "ab"
STOPS = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first prefix that ends with a stop string; the longest such one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(text=st.text(alphabet=ALPHABET, max_size=40), stops=STOPS, cuts=CUTS)
@settings(max_examples=500, deadline=None)
def test_stop_strings_do_not_depend_on_chunks(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    out, matched = "", None
    for span in spans(len(text), cuts):
        emitted, matched = matcher.push(text[span])
        out += emitted
    assert (out + matcher.flush(), matched) == first_stop(text, stops)
    assert matcher.matched == matched


def test_only_what_may_grow_into_a_stop_is_held() -> None:
    matcher = StopStrings(["</end>"])
    assert matcher.push("a < b </") == ("a < b ", None)
    assert matcher.push("x") == ("</x", None)
    assert matcher.push("</en") == ("", None)
    assert matcher.push("d> more") == ("", "</end>")
    assert matcher.push("more") == ("", "</end>")
    assert matcher.flush() == ""


def test_the_stop_that_is_complete_first_wins() -> None:
    matcher = StopStrings(["abcd", "bc"])
    assert matcher.push("xabcd") == ("xa", "bc")


def test_long_stop_strings_cost_no_more_per_character() -> None:
    stop = "a" * 50_000 + "b"
    matcher = StopStrings([stop])
    assert matcher.push("a" * 100_000)[1] is None
    assert matcher.push("b") == ("", stop)


def test_without_stops_all_passes() -> None:
    assert StopStrings([]).push("text") == ("text", None)
