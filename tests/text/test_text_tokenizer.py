"""Tokenizers of GGUF vocabularies against the libraries that trained them, and round trips."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from awkward import awkward_strings
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import (
    bpe_checkpoint,
    bpe_json,
    changed,
    gguf,
    spm_checkpoint,
    trained_bpe,
    trained_spm,
)

from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedModel
from headrace.formats.checkpoint import open_checkpoint
from headrace.text.chat import ChatTemplate, encode_chat, load_chat_template
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.types import Checkpoint, Message

BPE = load_tokenizer(bpe_checkpoint())
SPM = load_tokenizer(spm_checkpoint())
SPM_RUNS = load_tokenizer(spm_checkpoint(add_dummy_prefix=False))
ALL = pytest.mark.parametrize("tokenizer", [BPE, SPM, SPM_RUNS], ids=["bpe", "spm", "spm_runs"])
HF = Checkpoint("test", "hf", {"tokenizer_json": bpe_json()}, {})
TYPES = "tokenizer.ggml.token_type"
PLAIN = {"add_special": False, "parse_special": False}
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="ab \n▁<|>im_endtol’\u0301🙂é", max_size=60),
    st.lists(st.sampled_from(["<|im_end|>", "<tool>", " ", "wheel", "\n", "<s>"]), max_size=8).map(
        "".join
    ),
)


@pytest.mark.parametrize(
    "checkpoint", [bpe_checkpoint(), spm_checkpoint(), HF], ids=["bpe", "spm", "hf"]
)
@pytest.mark.parametrize("parse_special", [False, True])
def test_other_threads_run_while_a_long_text_is_encoded(
    checkpoint: Checkpoint, parse_special: bool
) -> None:
    tokenizer = load_tokenizer(checkpoint)
    is_done = threading.Event()
    gaps: list[float] = []

    def watch() -> None:
        before = time.monotonic()
        while not is_done.wait(0.001):
            now = time.monotonic()
            gaps.append(now - before)
            before = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    tokenizer.encode("the wheel " * 60_000, add_special=False, parse_special=parse_special)
    total = time.monotonic() - start
    is_done.set()
    watcher.join()
    assert max(gaps) < total / 2, f"threads stood still for {max(gaps):.2f} of {total:.2f} s"


def test_the_strings_are_200_different_ones() -> None:
    strings = awkward_strings()
    assert len(strings) == len(set(strings)) == 200


@pytest.mark.parametrize("text", awkward_strings())
def test_bpe_gives_the_ids_of_the_library(text: str) -> None:
    library = trained_bpe()
    library.encode_special_tokens = True
    assert BPE.encode(text, **PLAIN) == library.encode(text).ids
    library.encode_special_tokens = False
    assert BPE.encode(text, add_special=False, parse_special=True) == library.encode(text).ids


@pytest.mark.parametrize("text", awkward_strings())
def test_spm_gives_the_ids_of_the_library(text: str) -> None:
    if not text or "▁" in text:
        pytest.skip("no text: no added space here; ▁ is no space here when a run is looked for")
    assert SPM.encode(text, **PLAIN) == trained_spm().encode(text)
    assert SPM_RUNS.encode(text, **PLAIN) == trained_spm(add_dummy_prefix=False).encode(text)


@ALL
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    if tokenizer is SPM:
        text = text.replace("<tool>", "")  # a space is added behind it, as llama.cpp does
    lossy = text.replace("▁", " ") if tokenizer is not BPE else text  # SentencePiece's own loss
    assert tokenizer.decode(tokenizer.encode(text, **PLAIN)) == lossy


@ALL
@given(text=TEXTS, parse_special=st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_text_has_fewer_tokens_than_its_length_says(
    tokenizer: Tokenizer, text: str, parse_special: bool
) -> None:
    for given_text, sentinel in ((text, ""), (text.replace("e", "e\ue000"), "\ue000")):
        ids = tokenizer.encode_marked(given_text, sentinel, parse_special=parse_special)
        assert tokenizer.least_tokens(given_text, sentinel) <= len(ids)


@ALL
def test_a_long_text_surely_has_many_tokens(tokenizer: Tokenizer) -> None:
    longest = max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
    assert tokenizer.least_tokens("x" * longest * 50) == 50
    assert tokenizer.least_tokens("x\ue000" * longest * 50, "\ue000") == 50


@ALL
def test_a_chat_that_surely_does_not_fit_is_refused_early(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ContextTooLong, match="at least") as caught:
        encode_chat(tokenizer, template, [Message("user", "the wheel " * 5000)], max_tokens=50)
    assert caught.value.param == "messages"
    assert encode_chat(tokenizer, template, [Message("user", "wheel")], max_tokens=50)


def test_a_vocabulary_whose_unknown_token_takes_any_text_promises_nothing() -> None:
    kinds = [1 if kind == 6 else kind for kind in spm_checkpoint().metadata[TYPES]]
    tokenizer = load_tokenizer(changed(spm_checkpoint(), token_type=kinds))
    text = "\u2e80" * 100
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, **PLAIN)) < 5


@ALL
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_plain_text_never_gives_control_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert not any(map(tokenizer.is_control, tokenizer.encode(text, **PLAIN)))


@ALL
def test_special_text_is_a_token_only_when_asked(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_tokens["<|im_end|>"]
    assert tokenizer.encode("<|im_end|>", add_special=False, parse_special=True) == [end]
    ids = tokenizer.encode("<|im_end|>", **PLAIN)
    assert end not in ids
    assert tokenizer.decode(ids) == "<|im_end|>"


@ALL
def test_user_defined_pieces_always_match(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<tool>b", **PLAIN)
    assert [tokenizer.token_text(i) for i in ids].count("<tool>") == 1


def test_runs_of_spaces_use_the_user_defined_pieces() -> None:
    ids = SPM_RUNS.encode("a       b", **PLAIN)  # seven spaces
    pieces = [SPM_RUNS.token_text(i) for i in ids]
    assert pieces[:3] == ["a", " " * 4, " " * 2]
    assert SPM_RUNS.decode(ids) == "a       b"


def test_tokens_around_a_text_follow_the_flags() -> None:
    plain = SPM.encode("wheel", **PLAIN)
    assert SPM.add_bos
    assert SPM.encode("wheel", add_special=True, parse_special=False) == [1, *plain]
    both = load_tokenizer(changed(spm_checkpoint(), add_eos_token=True, add_bos_token=False))
    assert both.encode("wheel", add_special=True, parse_special=False) == [*plain, 2]
    assert not both.add_bos
    assert BPE.encode("wheel", add_special=True, parse_special=True) == BPE.encode("wheel", **PLAIN)


def test_a_beginning_token_is_never_doubled() -> None:
    once = SPM.encode("<s>wheel", add_special=True, parse_special=True)
    assert once == SPM.encode("wheel", add_special=True, parse_special=True)
    assert SPM.encode("<s>wheel", add_special=True, parse_special=False).count(1) == 1


def test_default_flags_follow_the_kind_of_vocabulary() -> None:
    assert load_tokenizer(changed(bpe_checkpoint(), add_bos_token=None)).add_bos is False
    llama3 = changed(bpe_checkpoint(pre="llama-bpe"), add_bos_token=None)
    assert load_tokenizer(llama3).add_bos is True


def test_end_ids_are_declared_ones_and_well_known_texts() -> None:
    assert BPE.eos_ids == (2, 0)  # <|im_end|> declared, <|endoftext|> known
    assert SPM.eos_ids == (2, SPM.special_tokens["<|im_end|>"])


def test_harmony_end_separates_messages_only() -> None:
    texts = ["<|return|>", "<|call|>", "<|end|>", "a"]
    tokenizer = load_tokenizer(
        gguf(model="gpt2", pre="gpt-4o", tokens=texts, token_type=[3, 3, 3, 1], merges=[])
    )
    assert tokenizer.eos_ids == (0, 1)


def test_an_end_text_of_another_type_counts_as_control() -> None:
    kinds = list(bpe_checkpoint().metadata["tokenizer.ggml.token_type"])
    kinds[2] = 4  # <|im_end|> said to be user-defined
    tokenizer = load_tokenizer(changed(bpe_checkpoint(), token_type=kinds))
    assert tokenizer.is_control(2)
    assert 2 not in tokenizer.encode("<|im_end|>", **PLAIN)


def test_control_tokens_are_no_text() -> None:
    ids = BPE.encode("<|im_start|>wheel<|im_end|>", add_special=False, parse_special=True)
    assert BPE.decode(ids) == "wheel"
    assert BPE.decode(ids, skip_special=False) == "<|im_start|>wheel<|im_end|>"
    assert BPE.token_bytes(2) == b""
    assert BPE.token_text(2) == "<|im_end|>"


def test_bytes_of_tokens() -> None:
    assert b"".join(map(BPE.token_bytes, BPE.encode("Räder 🙂", **PLAIN))) == "Räder 🙂".encode()
    newline = SPM.encode("a\x07", **PLAIN)[-1]
    assert SPM.token_text(newline) == "<0x07>"
    assert SPM.token_bytes(newline) == b"\x07"


def test_added_space_is_dropped_at_the_start_only() -> None:
    ids = SPM.encode("wheel wheel", **PLAIN)
    assert SPM.token_bytes(ids[0]).startswith(b" ")
    assert SPM.decode(ids) == "wheel wheel"
    assert SPM.decode([1, *ids]) == "wheel wheel"


def test_white_space_after_phi3_tokens_belongs_to_them() -> None:
    checkpoint = spm_checkpoint()
    named = type(checkpoint)(
        "phi.gguf", "gguf", {**checkpoint.metadata, "general.name": "Phi-3 mini"}, {}
    )
    tokenizer = load_tokenizer(named)
    tight = tokenizer.encode("<|im_end|>wheel", add_special=False, parse_special=True)
    assert tokenizer.encode("<|im_end|>\n wheel", add_special=False, parse_special=True) == tight


def test_text_the_vocabulary_cannot_write_is_refused() -> None:
    tokens = ["a", "b", "ab"]
    tokenizer = load_tokenizer(
        gguf(model="gpt2", pre="gpt-2", tokens=tokens, token_type=[1, 1, 1], merges=["a b"])
    )
    assert tokenizer.encode("abab", **PLAIN) == [2, 2]
    with pytest.raises(InvalidRequest, match="no tokens to write 'é'"):
        tokenizer.encode("abéc", **PLAIN)


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        BPE.encode(text, **PLAIN)


def test_bytes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="it must be str"):
        BPE.encode(b"abc", **PLAIN)  # type: ignore[arg-type]


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        BPE.token_bytes(token_id)


@pytest.mark.parametrize("model", ["bert", "t5", "gemma4", "plamo2", "rwkv", "none", "", 7])
def test_other_kinds_are_refused_by_name(model: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"known are gpt2 .*, llama"):
        load_tokenizer(gguf(model=model))


def test_several_pieces_may_be_of_type_unknown() -> None:
    """Phi-3 files give the type to padding tokens; the declared one is for unknown text."""
    checkpoint = spm_checkpoint()
    kinds = list(checkpoint.metadata["tokenizer.ggml.token_type"])
    kinds[-1] = 2
    tokenizer = load_tokenizer(changed(checkpoint, token_type=kinds))
    assert tokenizer.is_control(len(kinds) - 1)
    assert tokenizer.decode(tokenizer.encode("wheel", **PLAIN)) == "wheel"


def test_a_quarter_of_a_million_pieces_load(model_path: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(model_path("gemma3:270m"))
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.vocab_size == 262144
    assert tokenizer.eos_ids == (1, tokenizer.special_tokens["<end_of_turn>"])


def test_the_real_template_and_vocabulary_agree(model_path: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(model_path("smollm2:135m"))
    tokenizer, template = load_tokenizer(checkpoint), load_chat_template(checkpoint)
    ids = encode_chat(tokenizer, template, [Message("user", "Hi <|im_end|>")])
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [tokenizer.token_text(i) for i in ids if tokenizer.is_control(i)] == [
        *("<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>")
    ]
