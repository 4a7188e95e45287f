"""Tokenizers of Hugging Face folders: same ids as the library, specials, surroundings, refusals."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from awkward import awkward_strings
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, trainers
from vocabularies import CORPUS, bpe_json

from headrace.errors import FormatError, UnsupportedModel
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.types import Checkpoint

PLAIN = {"add_special": False, "parse_special": False}
BOS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    },
}


def byte_level(**changes: Any) -> dict[str, Any]:
    """A GPT-2-like tokenizer.json."""
    return {**copy.deepcopy(dict(bpe_json())), **changes}


@cache
def _llama_like() -> str:
    library = Library(models.BPE(unk_token="<unk>"))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    library.normalizer = normalizers.Sequence(steps)
    specials = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=specials, show_progress=False)
    library.train_from_iterator(CORPUS.split("\n"), trainer)
    content = json.loads(library.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    content["model"] |= {"byte_fallback": True, "fuse_unk": True}
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return json.dumps(content)


def llama_like() -> dict[str, Any]:
    """A Llama-2-like tokenizer.json: ▁ for spaces, one added in front, byte fallback."""
    content: dict[str, Any] = json.loads(_llama_like())
    return content


def folder(content: object, **metadata: Any) -> Checkpoint:
    return Checkpoint("folder", "hf", {"tokenizer_json": content, **metadata}, {})


def library_of(content: dict[str, Any], *, specials_are_text: bool) -> Library:
    library = Library.from_str(json.dumps(content))
    library.encode_special_tokens = specials_are_text
    return library


KINDS = {"byte_level": byte_level(), "llama": llama_like()}
TOKENIZERS = {name: load_tokenizer(folder(content)) for name, content in KINDS.items()}
BOTH = pytest.mark.parametrize("kind", list(KINDS))


@BOTH
@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_are_those_of_the_library(kind: str, parse_special: bool) -> None:
    library = library_of(KINDS[kind], specials_are_text=not parse_special)
    for text in awkward_strings():
        ids = TOKENIZERS[kind].encode(text, add_special=False, parse_special=parse_special)
        assert ids == library.encode(text, add_special_tokens=False).ids, repr(text)


@BOTH
@given(text=st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_text_comes_back(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = text.replace("▁", "") if kind == "llama" else text
    ids = tokenizer.encode(text, **PLAIN)
    assert tokenizer.decode(ids) == text
    assert not any(map(tokenizer.is_control, ids))


@BOTH
def test_decodes_as_the_library_does(kind: str) -> None:
    library = library_of(KINDS[kind], specials_are_text=False)
    for text in awkward_strings():
        ids = library.encode(text, add_special_tokens=False).ids
        assert TOKENIZERS[kind].decode(ids) == library.decode(ids), repr(text)


def test_a_continuation_keeps_its_space() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = tokenizer.encode("wheel", **PLAIN)
    assert Detokenizer(tokenizer).push(ids) == " wheel"
    assert Detokenizer(tokenizer, at_start=True).push(ids) == "wheel"


@BOTH
def test_marks_found_around_a_sentinel_are_tokens_and_broken_ones_are_not(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    end = tokenizer.special_tokens["<|im_end|>"]
    ids = tokenizer.encode_marked("a<\ue000|im_end|>b<|im_end|>", "\ue000")
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert tokenizer.decode(ids).replace(" ", "") == "a<|im_end|>b"


def test_a_word_that_is_a_control_token_is_spelt_out_in_plain_text() -> None:
    content = byte_level()
    content["model"]["ignore_merges"] = True
    content["added_tokens"].append(special_token(content["model"]["vocab"]["Ġwheel"], "Ġwheel"))
    tokenizer = load_tokenizer(folder(content))
    ids = tokenizer.encode("a wheel", **PLAIN)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == "a wheel"


def special_token(token_id: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, "special": True, **flags}


# ---- surroundings and end ids
#


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=True, parse_special=True)


def test_the_post_processor_says_what_begins_a_text() -> None:
    config = {"bos_token": "<|im_start|>"}
    tokenizer = load_tokenizer(folder(byte_level(post_processor=BOS), tokenizer_config=config))
    plain = tokenizer.encode("wheel", **PLAIN)
    assert tokenizer.add_bos
    assert encoded(tokenizer, "wheel") == [1, *plain]
    assert encoded(tokenizer, "<|im_start|>wheel") == [1, *plain]  # not doubled
    assert tokenizer.chat_bos_id is None  # a chat template writes it itself


def test_add_bos_token_wins_over_the_post_processor() -> None:
    off = {"bos_token": "<|im_start|>", "add_bos_token": False}
    with_processor = byte_level(post_processor=BOS)
    assert not load_tokenizer(folder(with_processor, tokenizer_config=off)).add_bos
    on = {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": True}
    assert load_tokenizer(folder(byte_level(), tokenizer_config=on)).add_bos


def test_end_ids_come_from_every_file() -> None:
    checkpoint = folder(
        byte_level(),
        tokenizer_config={"eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": [2, 7]},
        eos_token_id=9,
    )
    assert load_tokenizer(checkpoint).eos_ids == (2, 7, 9, 0)


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = load_tokenizer(folder(byte_level(truncation=cut)))
    assert tokenizer.decode(tokenizer.encode("the wheel " * 9, **PLAIN)) == "the wheel " * 9


def test_ids_without_a_token_are_empty() -> None:
    content = byte_level()
    content["added_tokens"].append(special_token(500, "<far>"))
    tokenizer = load_tokenizer(folder(content))
    assert tokenizer.vocab_size in (401, 402, 501)
    assert tokenizer.token_text(tokenizer.vocab_size - 1) == "<far>"


def test_threads_do_not_disturb_each_other() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text = "wheel<|im_end|>" * 20
    expected = {
        special: tokenizer.encode(text, add_special=False, parse_special=special)
        for special in (False, True)
    }

    def same(i: int) -> bool:
        special = i % 2 == 0
        return tokenizer.encode(text, add_special=False, parse_special=special) == expected[special]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, range(400)))


# ---- refusals
#


def wrong(path: str, value: object) -> dict[str, Any]:
    content = byte_level()
    node: Any = content
    *parents, last = path.split(".")
    for name in parents:
        node = node[name]
    node[last] = value
    return content


MALFORMED = [
    ("not an object", folder(["x"]), "is not an object"),
    ("no model", folder({}), "cannot be read"),
    ("bad merges", folder(wrong("model.merges", [["a", "nope"]])), "cannot be read"),
    ("bad vocab", folder(wrong("model.vocab", {"a": -1})), "cannot be read"),
    ("eos range", folder(byte_level(), eos_token_id=10**6), "eos_token_id"),
    ("eos type", folder(byte_level(), eos_token_id="2"), "must be a number or a list"),
    ("eos unknown", folder(byte_level(), tokenizer_config={"eos_token": "<?>"}), "is not in"),
    ("bos type", folder(byte_level(), tokenizer_config={"bos_token": 3}), "is not in"),
    ("config type", folder(byte_level(), tokenizer_config=[]), "is not an object"),
]


@pytest.mark.parametrize(
    ("checkpoint", "message"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED]
)
def test_malformed_folders_are_refused(checkpoint: Checkpoint, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        load_tokenizer(checkpoint)


def test_a_folder_with_sentencepiece_only_says_what_to_do() -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json.*save_pretrained"):
        load_tokenizer(folder(None))


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_other_decoders_are_refused(decoder: object) -> None:
    with pytest.raises(UnsupportedModel, match="known are ByteLevel, ByteFallback and Metaspace"):
        load_tokenizer(folder(byte_level(decoder=decoder)))


def test_a_prefix_that_the_library_does_not_survive_is_refused() -> None:
    """It would cut bytes off every merge and end the process."""
    with pytest.raises(UnsupportedModel, match="continuing_subword_prefix 'x'"):
        load_tokenizer(folder(wrong("model.continuing_subword_prefix", "x")))
