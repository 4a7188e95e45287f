"""The Python API over a fake engine: forms of prompts, options, order, ends."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fake_engine import EOS, FakeEngine, endless

import headrace
from headrace.config import EngineConfig
from headrace.errors import (
    ContextTooLong,
    EngineFailure,
    FormatError,
    InvalidRequest,
    UnknownParameter,
)
from headrace.llm import (
    LLM,
    AsyncEngine,
    EngineOptions,
    SamplingOptions,
    engine_config,
    sampling_params,
)
from headrace.service import Service
from headrace.types import Checkpoint, Message, SamplingParams, with_chat_template

MakeService = Callable[..., Service]
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def llm(make_service: MakeService) -> LLM:
    return LLM.over(make_service())


def test_options_are_the_fields() -> None:
    assert set(SamplingOptions.__annotations__) == {f.name for f in fields(SamplingParams)}
    assert set(EngineOptions.__annotations__) == {f.name for f in fields(EngineConfig)}


def test_prompts_in_every_form(llm: LLM) -> None:
    def texts(prompts: Any) -> list[str]:
        return [answer.text for answer in llm.generate(prompts)]

    assert texts("a") == ["A"]
    assert texts(["b", "a", "c"]) == ["B", "A", "C"]
    assert texts([[97, 98], [99]]) == ["AB", "C"]
    assert texts([97, 98]) == ["AB"]
    assert texts((97,)) == ["A"]
    assert texts(["a", [98]]) == ["A", "B"]
    assert texts([]) == []
    for bad in (["a", 1], [None], [1.5], [b"a"], b"a", {"a": 1}, None, 5):
        with pytest.raises(InvalidRequest):
            texts(bad)


@pytest.mark.parametrize("prompt", [None, 5, b"a", [None], [5.0], {"role": "user"}, [[]], [b"a"]])
def test_what_is_neither_prompt_nor_conversation_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.stream(prompt)
    with pytest.raises(InvalidRequest):
        llm.chat(prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": 5},
        {"stop": [1]},
        {"stop": b"a"},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"logit_bias": 5},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1: "a"}},
        {"logit_bias": {1: True}},
        {"logit_bias": [(1,)]},
        {"logit_bias": [1]},
        {"ignore_eos": "yes"},
        {"params": {"max_tokens": 2}},
        {"params": SamplingParams},
    ],
)
def test_options_of_the_wrong_type_are_named(llm: LLM, options: Any) -> None:
    (name,) = options
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("a", **options)
    assert caught.value.param == name


def test_a_path_may_be_a_path_object(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with pytest.raises(FormatError, match=r"model\.gguf"):
        LLM(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequest, match="neither"):
        LLM(None)  # type: ignore[arg-type]


def test_an_answer_has_its_parts(llm: LLM) -> None:
    [answer] = llm.generate("ab", max_tokens=2, temperature=0, seed=1, ignore_eos=True)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("AB", tuple(b"AB"), "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 2)


def test_choices_stand_side_by_side(llm: LLM) -> None:
    answers = llm.generate(["a", "b"], n=2)
    assert [answer.text for answer in answers] == ["A", "A#1", "B", "B#1"]


def test_all_prompts_are_checked_before_any_runs(llm: LLM, make_service: MakeService) -> None:
    service = make_service()
    with pytest.raises(ContextTooLong):
        LLM.over(service).generate(["a", "b" * 5000])
    assert isinstance(service.client, FakeEngine)
    assert service.client.requests == []


def test_chat_and_stream(llm: LLM) -> None:
    assert llm.chat(HELLO).text == "USER: HI\n"
    assert llm.chat([Message("user", "hi")]).text == "USER: HI\n"
    assert "".join(delta.text for delta in llm.stream(HELLO)) == "USER: HI\n"
    assert "".join(delta.text for delta in llm.stream("ab")) == "AB"
    assert "".join(delta.text for delta in llm.stream([97], stop="X")) == "A"
    with llm.stream("abc") as stream:
        assert next(stream).text == "A"
    for bad in ([{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "u", "x": "y"}]):
        with pytest.raises(InvalidRequest):
            llm.chat(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="n is 2"):
        llm.chat(HELLO, n=2)


def test_options_override_params() -> None:
    base = SamplingParams(temperature=0.5, top_k=3)
    assert sampling_params(base, {"top_k": 4}) == SamplingParams(temperature=0.5, top_k=4)
    assert sampling_params(None, {"stop": "a", "logit_bias": {3: 1.0}}) == SamplingParams(
        stop=("a",), logit_bias=((3, 1.0),)
    )
    assert sampling_params(None, {"stop": ["a"], "stop_token_ids": [EOS]}) == SamplingParams(
        stop=("a",), stop_token_ids=(EOS,)
    )


def test_an_unknown_option_is_named(llm: LLM) -> None:
    with pytest.raises(UnknownParameter, match="did you mean 'max_tokens'"):
        llm.generate("a", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(UnknownParameter, match="did you mean 'num_threads'"):
        engine_config({"num_thread": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(UnknownParameter, match="did you mean 'backend'"):
        headrace.LLM("nowhere", backed="cpu")  # type: ignore[call-arg]


def test_async_engine(make_service: MakeService) -> None:
    async def run() -> None:
        async with AsyncEngine.over(make_service()) as engine:
            answers = await engine.generate(["a", "b"], temperature=0)
            assert [answer.text for answer in answers] == ["A", "B"]
            assert (await engine.chat(HELLO)).text == "USER: HI\n"
            async with contextlib.aclosing(engine.stream("ab", max_tokens=9)) as stream:
                assert "".join([d.text async for d in stream]) == "AB"
            both = await asyncio.gather(engine.generate("c"), engine.generate("d"))
            assert [answer.text for [answer] in both] == ["C", "D"]

    asyncio.run(run())


def test_close_ends_the_engine(make_service: MakeService) -> None:
    service = make_service(script=endless)
    with LLM.over(service) as llm:
        assert llm.tokenizer is service.model.tokenizer
    with pytest.raises(EngineFailure):
        llm.generate("a")


def test_what_the_python_api_does_not_import() -> None:
    banned = ("fastapi", "starlette", "uvicorn", "prometheus_client", "torch", "ray", "pydantic")
    code = f"import headrace.llm, sys; print([m for m in {banned!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_template_given_as_text_replaces_the_models() -> None:
    checkpoint = Checkpoint("x", "hf", {"chat_template": "old", "model_type": "llama"}, {})
    changed = with_chat_template(checkpoint, "new")
    assert changed.metadata == {"chat_template": "new", "model_type": "llama"}
    assert checkpoint.metadata["chat_template"] == "old"
