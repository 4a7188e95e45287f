"""Hostile and broken tokenizer metadata: each kind ends in one clear error, never a guess."""

from __future__ import annotations

from typing import Any

import pytest
from vocabularies import bpe_checkpoint, changed, spm_checkpoint

from headrace.errors import FormatError, UnsupportedModel
from headrace.text.tokenizer import load_tokenizer

BPE, SPM = bpe_checkpoint(), spm_checkpoint()
SIZE = len(BPE.metadata["tokenizer.ggml.tokens"])


def edited(name: str, index: int, value: object, checkpoint: Any = BPE) -> dict[str, list[Any]]:
    """One list key with one entry changed."""
    values = list(checkpoint.metadata[f"tokenizer.ggml.{name}"])
    values[index] = value
    return {name: values}


def cut(name: str, checkpoint: Any = BPE) -> dict[str, list[Any]]:
    """One list key without its last entry."""
    return {name: list(checkpoint.metadata[f"tokenizer.ggml.{name}"])[:-1]}


BAD_BPE: list[tuple[str, dict[str, Any], str]] = [
    ("no tokens", {"tokens": None}, "tokens must be a list of strings"),
    ("empty list", {"tokens": [], "token_type": []}, "tokens is empty"),
    ("token not text", edited("tokens", 5, 7), "tokens must be a list of strings"),
    ("token twice", edited("tokens", 9, "a"), "are both 'a'"),
    ("token too long", edited("tokens", 9, "x" * 5000), "at most 4096"),
    ("no types", {"token_type": None}, "token_type must be a list of numbers"),
    ("types too short", cut("token_type"), f"has {SIZE - 1} entries for {SIZE} tokens"),
    ("unknown type", edited("token_type", 3, 9), "not all between 1 and 6"),
    ("type not a number", edited("token_type", 3, "1"), "must be a list of numbers"),
    ("type a bool", edited("token_type", 3, True), "must be a list of numbers"),
    ("no merges", {"merges": None}, "merges must be a list of strings"),
    ("merge of one", edited("merges", 0, "a"), "is not two known tokens"),
    ("merge of three", edited("merges", 0, "a b c"), "is not two known tokens"),
    ("merge of unknown", edited("merges", 0, "a \u4e00"), "is not two known tokens"),
    ("merge makes unknown", edited("merges", 0, "z q"), "is not two known tokens"),
    ("bos outside", {"bos_token_id": SIZE}, f"must be between 0 and {SIZE - 1}"),
    ("eos negative", {"eos_token_id": -1}, "must be between 0"),
    ("eot a text", {"eot_token_id": "2"}, "must be between 0"),
    ("unknown a bool", {"unknown_token_id": True}, "must be between 0"),
    ("misspelt key too", {"seperator_token_id": SIZE}, "seperator_token_id is"),
    ("flag not a bool", {"add_bos_token": 1}, "must be a bool"),
    ("bos without id", {"add_bos_token": True, "bos_token_id": None}, "no bos_token_id"),
    ("eos without id", {"add_eos_token": True, "eos_token_id": None}, "no eos_token_id"),
    ("pre missing", {"pre": None}, "pre is missing"),
    ("pre not text", {"pre": 3}, "must be a string"),
]
BYTE = SPM.metadata["tokenizer.ggml.token_type"].index(6)
BAD_SPM: list[tuple[str, dict[str, Any], str]] = [
    (f"byte {piece}", edited("tokens", BYTE, piece, SPM), "not <0x00> to <0xFF>")
    for piece in ("<0x-1>", "<0xfg>", "<0x0>", "<0x100>", "<0X00>", "0x00", "<0x00> ", "<0xff>")
] + [
    ("no scores", {"scores": None}, "scores must be a list of numbers"),
    ("scores too short", cut("scores", SPM), "entries for"),
    ("score nan", edited("scores", 9, float("nan"), SPM), "not finite"),
    ("score too large", edited("scores", 9, 1e39, SPM), "not finite"),
    ("score infinite", edited("scores", 9, float("inf"), SPM), "not finite"),
    ("prefix flag", {"add_space_prefix": "yes"}, "must be a bool"),
]


@pytest.mark.parametrize(
    ("keys", "message"), [row[1:] for row in BAD_BPE], ids=[r[0] for r in BAD_BPE]
)
def test_bad_bpe_metadata(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message) as error:
        load_tokenizer(changed(BPE, **keys))
    assert "test.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"), [row[1:] for row in BAD_SPM], ids=[r[0] for r in BAD_SPM]
)
def test_bad_spm_metadata(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        load_tokenizer(changed(SPM, **keys))


@pytest.mark.parametrize("pre", ["superbpe", "youtu", "afmoe", "llama", "LLAMA3", ""])
def test_an_unknown_pre_is_refused_with_the_list(pre: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"Known: .*llama-bpe.*smollm"):
        load_tokenizer(changed(BPE, pre=pre))


def test_a_piece_per_length_does_not_exhaust_the_stack() -> None:
    """A trie of 4,000 levels, as user-defined pieces could make."""
    pieces = ["a" * n for n in range(1, 4000)]
    checkpoint = changed(
        BPE, tokens=pieces, token_type=[4] * len(pieces), merges=[], eos_token_id=0
    )
    with pytest.raises(FormatError, match="too deeply nested"):
        load_tokenizer(checkpoint)


def test_tokens_without_text_are_never_given() -> None:
    checkpoint = changed(BPE, **edited("tokens", 399, ""))
    merges = [
        m
        for m in BPE.metadata["tokenizer.ggml.merges"]
        if m.replace(" ", "") in checkpoint.metadata["tokenizer.ggml.tokens"]
    ]
    tokenizer = load_tokenizer(changed(checkpoint, merges=merges))
    assert tokenizer.token_bytes(399) == b""
    assert tokenizer.encode("wheel", add_special=False, parse_special=True)
