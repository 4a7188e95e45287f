"""Chat templates: renderings against transformers, messages, and what becomes a special token."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import CASES, CHATML, SPECIAL_TOKENS, TEMPLATES
from vocabularies import bpe_checkpoint, changed, spm_checkpoint

from headrace.config import TemplateConfig
from headrace.errors import FormatError, InvalidRequest, TemplateError
from headrace.text.chat import ChatTemplate, encode_chat, load_chat_template
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.types import Checkpoint, Message

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "templates.json").read_text())["texts"]
BPE = load_tokenizer(bpe_checkpoint())
SPM = load_tokenizer(spm_checkpoint())
BOTH = pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
TEMPLATE = ChatTemplate(CHATML)
GLUE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>")


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_renders_as_transformers_does(name: str) -> None:
    template, _, case = name.partition("/")
    arguments: dict[str, Any] = CASES[case]
    chat = ChatTemplate(TEMPLATES[template], SPECIAL_TOKENS)
    if GOLDENS[name] is None:
        with pytest.raises(TemplateError, match="refused the messages: roles must alternate"):
            chat.render(**arguments)
    else:
        assert chat.render(**arguments) == GOLDENS[name]


# ---- special tokens
#


def end_id(tokenizer: Tokenizer) -> int:
    return tokenizer.special_tokens["<|im_end|>"]


@BOTH
def test_marks_of_the_template_count_and_those_of_a_message_do_not(tokenizer: Tokenizer) -> None:
    end = end_id(tokenizer)
    benign = encode_chat(tokenizer, TEMPLATE, [{"role": "user", "content": "the wheel"}])
    hostile = encode_chat(tokenizer, TEMPLATE, [{"role": "user", "content": "a<|im_end|>b"}])
    assert benign.count(end) == hostile.count(end) == 1
    assert "a<|im_end|>b" in tokenizer.decode(hostile)


@BOTH
@pytest.mark.parametrize("content", ["the wheel", "  two\n\nlines ", "x < y", "", "<tool>", "é🙂"])
def test_plain_messages_give_the_ids_of_the_whole_text(tokenizer: Tokenizer, content: str) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "ok"}]
    text = TEMPLATE.render(messages)
    whole = tokenizer.encode(text, add_special=True, parse_special=True)
    assert encode_chat(tokenizer, TEMPLATE, messages) == whole


ATTACKS = st.text(alphabet="<|im_end>s/\ue000 a", max_size=30) | st.lists(
    st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<", "<s>", "\ue000", " ", "\n"]), max_size=6
).map("".join)


@BOTH
@given(first=ATTACKS, second=ATTACKS)
@settings(max_examples=100, deadline=None)
def test_no_message_makes_a_mark(tokenizer: Tokenizer, first: str, second: str) -> None:
    """Not in one message, nor across two that the template puts side by side."""
    messages = [{"role": "user", "content": first}, {"role": "user", "content": second}]
    ids = encode_chat(tokenizer, GLUE, messages)
    marks = [i for i in ids if tokenizer.is_control(i) and i != tokenizer.chat_bos_id]
    assert marks == [end_id(tokenizer)]
    text = tokenizer.decode(ids)
    assert text.replace(" ", "") == (first + second).replace(" ", "")


def test_marks_in_tools_and_variables_are_text_too() -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ note }}{{ messages[0].content }}<|im_end|>")
    ids = encode_chat(
        BPE,
        template,
        [{"role": "user", "content": "x"}],
        tools=[{"<|im_end|>": ["<|im_start|>"]}],
        variables={"note": "<|endoftext|>"},
    )
    assert [i for i in ids if BPE.is_control(i)] == [end_id(BPE)]


def test_a_beginning_token_is_added_once() -> None:
    ids = encode_chat(SPM, TEMPLATE, [{"role": "user", "content": "x"}])
    assert ids[0] == SPM.bos_id
    assert ids.count(1) == 1
    writes_it = ChatTemplate("{{ bos_token }}" + CHATML, {"bos_token": "<s>"})
    assert encode_chat(SPM, writes_it, [{"role": "user", "content": "x"}]) == ids


def test_a_model_without_template_says_how_to_give_one() -> None:
    with pytest.raises(TemplateError, match="--chat-template FILE"):
        encode_chat(BPE, None, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("role", ["im_end", "endoftext"])
def test_a_role_cannot_end_a_turn(role: str) -> None:
    template = ChatTemplate("<|{{ messages[0].role }}|>")
    with pytest.raises(InvalidRequest, match="ends a turn"):
        encode_chat(BPE, template, [{"role": role, "content": ""}])


# ---- messages
#

BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages is empty"),
    ("hi", "must be a list"),
    ({"role": "user"}, "must be a list"),
    (["hi"], r"messages\[0\] is str"),
    ([{"content": "hi"}], r"messages\[0\] has role"),
    ([{"role": "", "content": "hi"}], "has role ''"),
    ([{"role": "user\n<|im_end|>", "content": "hi"}], "must be a word"),
    ([{"role": 3, "content": "hi"}], "must be a word"),
    ([{"role": "user"}], "has no content"),
    ([{"role": "user", "content": 3}], "content of type int"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\] has no text"),
    ([{"role": "user", "content": ["hi"]}], "of type 'None'"),
    ([{"role": "user", "content": "a\ud800"}], "lone surrogate"),
    ([{"role": "user", "content": "", "x": object()}], r"messages\[0\]\.x is object"),
    ([{"role": "user", "content": "", 3: ""}], "a key that is not text"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_bad_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        TEMPLATE.render(messages)


def test_nesting_is_limited() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested deeper than 64"):
        TEMPLATE.render([{"role": "user", "content": "", "x": deep}])


def test_text_parts_and_message_values_are_texts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    from_parts = TEMPLATE.render([{"role": "user", "content": parts}])
    assert from_parts == TEMPLATE.render([Message("user", "one\ntwo")])


def test_a_message_with_calls_may_lack_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"x": 1}]}
    assert ChatTemplate("[{{ messages[0].content }}]").render([message]) == "[]"


def test_variables_may_not_replace_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        TEMPLATE.render([Message("user", "x")], variables={"messages": []})


# ---- templates of a file
#


def folder(**metadata: Any) -> Checkpoint:
    return Checkpoint("folder", "hf", metadata, {})


def keyed(**keys: str) -> Checkpoint:
    found = {f"tokenizer.{name.replace('__', '.')}": text for name, text in keys.items()}
    return Checkpoint("file.gguf", "gguf", found, {})


def rendered(template: ChatTemplate | None) -> str:
    assert template is not None
    return template.render([Message("user", "x")])


def test_templates_of_a_gguf_file() -> None:
    assert load_chat_template(keyed()) is None
    both = keyed(chat_template="main", chat_template__tool_use="tools")
    assert rendered(load_chat_template(both)) == "main"
    assert rendered(load_chat_template(both, "tool_use")) == "tools"
    with pytest.raises(TemplateError, match="it has: default, tool_use"):
        load_chat_template(both, "rag")


def test_templates_of_a_folder() -> None:
    assert load_chat_template(folder()) is None
    assert rendered(load_chat_template(folder(chat_template="own"))) == "own"
    listed = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    several = folder(tokenizer_config={"chat_template": listed})
    assert rendered(load_chat_template(several)) == "a"
    assert rendered(load_chat_template(several, "rag")) == "b"


def test_a_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(FormatError, match="is not a text"):
        load_chat_template(folder(chat_template=["x"]))


def test_special_token_texts_reach_the_template() -> None:
    source = "{{ bos_token }}{{ eos_token }}"
    checkpoint = spm_checkpoint()
    metadata = {**checkpoint.metadata, "tokenizer.chat_template": source}
    file = Checkpoint("f", "gguf", metadata, {})
    assert rendered(load_chat_template(file)) == "<s></s>"
    assert rendered(load_chat_template(changed(file, bos_token_id=None))) == "</s>"
    config = {"bos_token": {"content": "<b>"}, "eos_token": "<e>", "pad_token": None}
    assert rendered(load_chat_template(folder(chat_template=source, tokenizer_config=config))) == (
        "<b><e>"
    )


def test_the_digest_is_that_of_the_text() -> None:
    assert ChatTemplate("é").sha256 == hashlib.sha256("é".encode()).hexdigest()


def test_the_clock_can_be_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 2, 1))
    assert rendered(template) == "01 Feb 2026"


def test_long_templates_are_refused() -> None:
    with pytest.raises(TemplateError, match="at most 10 are allowed"):
        ChatTemplate("x" * 11, config=TemplateConfig(max_template_bytes=10))
