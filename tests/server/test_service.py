"""The service over a fake engine: one path for text, whoever reads it and however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from byte_model import ByteCodec, byte_model
from fake_engine import EOS, FakeEngine, echo, endless
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import ServerConfig
from headrace.errors import (
    ContextTooLong,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    ReaderTooSlow,
    TemplateError,
)
from headrace.server.metrics import Metrics
from headrace.service import Service
from headrace.types import Message, Request, SamplingParams, TextDelta

MakeService = Callable[..., Service]


def fixed(tokens: Iterable[int]) -> Callable[[Request, int], Iterable[int]]:
    """A script that says the same whatever is asked."""
    held = list(tokens)
    return lambda request, index: held


def engine_of(service: Service) -> FakeEngine:
    assert isinstance(service.client, FakeEngine)
    return service.client


# ---- preparing


def test_without_max_tokens_the_rest_of_the_context_is_asked_for(
    make_service: MakeService,
) -> None:
    request = make_service().prepare_prompt("x" * 10)
    assert request.params.max_tokens == byte_model().max_context - 10


def test_what_surely_does_not_fit_is_refused_before_it_is_encoded(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    monkeypatch.delattr(ByteCodec, "encode")
    text = "x" * 6000
    with pytest.raises(ContextTooLong, match=r"at least 1200 tokens.* 1000 ") as caught:
        service.prepare_prompt(text)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextTooLong, match="at least") as caught:
        service.prepare_chat([Message("user", text)])
    assert caught.value.param == "messages"


def test_a_seed_is_drawn_when_none_is_given(make_service: MakeService) -> None:
    service = make_service()
    seeds = {service.prepare_prompt("x").params.seed for _ in range(3)}
    assert len(seeds) == 3
    assert None not in seeds
    assert service.prepare_prompt("x", SamplingParams(seed=7)).params.seed == 7


def test_the_context_is_checked_with_its_numbers(make_service: MakeService) -> None:
    service = make_service()
    with pytest.raises(ContextTooLong, match=r"1200 tokens.* 1000 ") as caught:
        service.prepare_prompt("x" * 1200)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextTooLong, match="990 tokens and max_tokens is 11") as caught:
        service.prepare_prompt("x" * 990, SamplingParams(max_tokens=11))
    assert caught.value.param == "max_tokens"
    assert service.prepare_prompt("x" * 990, SamplingParams(max_tokens=10))
    with pytest.raises(ContextTooLong):
        service.prepare_prompt("x" * 1000)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(make_service: MakeService, prompt: str | list[int]) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        make_service().prepare_prompt(prompt)


def test_ids_outside_the_vocabulary_are_refused(make_service: MakeService) -> None:
    service = make_service()
    for bad in (-1, 257, True, 1.5, "a"):
        with pytest.raises(InvalidRequest, match="0 to 256") as caught:
            service.prepare_prompt([1, bad])  # type: ignore[list-item]
        assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        service.prepare_prompt("x", SamplingParams(logit_bias=((257, 1.0),)))
    assert caught.value.param == "logit_bias"
    with pytest.raises(InvalidRequest) as caught:
        service.prepare_prompt("x", SamplingParams(stop_token_ids=(999,)))
    assert caught.value.param == "stop_token_ids"


def test_half_a_surrogate_is_not_text(make_service: MakeService) -> None:
    service = make_service()
    with pytest.raises(InvalidRequest, match="surrogate"):
        service.prepare_prompt("a\ud800")
    with pytest.raises(InvalidRequest, match="surrogate"):
        service.prepare_chat([Message("user", "\udfff")])


def test_chat_needs_a_template_and_messages(make_service: MakeService) -> None:
    service = make_service()
    with pytest.raises(InvalidRequest, match="at least one"):
        service.prepare_chat([])
    bare = Service(byte_model(has_template=False), service.client)
    with pytest.raises(TemplateError):
        bare.prepare_chat([Message("user", "hi")])


def test_templates_get_their_variables(make_service: MakeService) -> None:
    service = make_service()
    request = service.prepare_chat([Message("user", "hi")], variables={"greeting": "yo "})
    assert bytes(request.prompt_token_ids) == b"yo user: hi\n"
    with pytest.raises(InvalidRequest, match="messages"):
        service.prepare_chat([Message("user", "hi")], variables={"messages": []})


# ---- one path for text


def test_an_answer_and_its_parts(make_service: MakeService) -> None:
    service = make_service(cached_tokens=2)
    [answer] = service.complete(service.prepare_prompt("hello"))
    assert answer.text == "HELLO"
    assert answer.token_ids == (*b"HELLO", EOS)
    assert answer.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)
    assert answer.usage.cached_tokens == 2


def test_length_is_the_other_end(make_service: MakeService) -> None:
    service = make_service(script=endless)
    [answer] = service.complete(service.prepare_prompt("x", SamplingParams(max_tokens=3)))
    assert (answer.text, answer.finish_reason) == ("abc", "length")


def test_a_character_cut_by_the_end_shows_as_a_replacement(make_service: MakeService) -> None:
    service = make_service(script=fixed([*"é".encode()[:1], EOS]))
    [answer] = service.complete(service.prepare_prompt("x"))
    assert answer.text == "\ufffd"


def test_a_stop_string_ends_the_answer_and_the_work(make_service: MakeService) -> None:
    service = make_service(script=endless, cached_tokens=1, gate=threading.Semaphore(6))
    [answer] = service.complete(service.prepare_prompt("x", SamplingParams(stop=("ef", "zz"))))
    assert (answer.text, answer.finish_reason) == ("abcd", "stop")
    assert answer.token_ids == tuple(b"abcdef")
    assert answer.usage.completion_tokens == 6
    assert answer.usage.cached_tokens == 1
    assert engine_of(service).stats().requests_aborted == 1


def test_a_stop_string_ends_one_choice_only(make_service: MakeService) -> None:
    service = make_service(script=lambda request, index: b"abcdef" if index else b"xyzxyz")
    params = SamplingParams(stop=("yz",), max_tokens=6, n=2)
    first, second = service.complete(service.prepare_prompt("x", params))
    assert (first.text, first.finish_reason) == ("x", "stop")
    assert (second.text, second.finish_reason) == ("abcdef", "length")


def test_a_stop_string_that_does_not_come_is_given_back(make_service: MakeService) -> None:
    service = make_service(script=fixed([*b"abcd", EOS]))
    [answer] = service.complete(service.prepare_prompt("x", SamplingParams(stop=("cde",))))
    assert (answer.text, answer.finish_reason) == ("abcd", "stop")
    assert answer.usage.completion_tokens == 5


def test_stop_strings_wait_for_min_tokens(make_service: MakeService) -> None:
    service = make_service(script=endless)
    params = SamplingParams(stop=("c",), min_tokens=5, max_tokens=100)
    [answer] = service.complete(service.prepare_prompt("x", params))
    assert answer.text == "abcdefghijklmnopqrstuvwxyzab"


TOKENS = st.lists(st.sampled_from([*"aé€😀b".encode(), *b"ab"]), max_size=30)
STOPS = st.lists(st.sampled_from(["a", "ab", "é", "ba", "€😀", "bbb"]), max_size=3)


@given(TOKENS, STOPS)
def test_streamed_text_is_the_whole_text(tokens: list[int], stops: list[str]) -> None:
    script = fixed([*tokens, EOS])
    service = Service(byte_model(), FakeEngine(script))
    try:
        request = service.prepare_prompt("x", SamplingParams(stop=tuple(stops)))
        deltas = list(service.stream(request))
        [answer] = service.complete(replace(request, id="again"))
        [other] = asyncio.run(service.acomplete(replace(request, id="async")))
    finally:
        service.close()
    assert "".join(delta.text for delta in deltas) == answer.text == other.text
    assert [d.finish_reason for d in deltas if d.finish_reason] == [answer.finish_reason]
    assert sum((d.token_ids for d in deltas), ()) == answer.token_ids
    assert answer.text == _expected(bytes(tokens), stops)
    assert not any(stop in answer.text for stop in stops)


def _expected(raw: bytes, stops: list[str]) -> str:
    """What a stop string means, said without increments: cut at the first that is complete."""
    text = raw.decode("utf-8", "replace")
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


def test_choices_and_requests_come_in_order(make_service: MakeService) -> None:
    service = make_service()
    params = SamplingParams(n=2)
    requests = [service.prepare_prompt(text, params) for text in ("ab", "c")]
    answers = service.complete(*requests)
    assert [answer.text for answer in answers] == ["AB", "AB#1", "C", "C#1"]
    assert [answer.index for answer in answers] == [0, 1, 0, 1]
    places = {delta.index for delta in service.stream(*_again(requests))}
    assert places == {0, 1, 2, 3}


def _again(requests: list[Request]) -> list[Request]:
    return [replace(request, id=request.id + "-again") for request in requests]


def test_logprobs_follow_their_tokens(make_service: MakeService) -> None:
    service = make_service(script=fixed([*"é".encode(), *b"b", EOS]))
    deltas = list(service.stream(service.prepare_prompt("x", SamplingParams(logprobs=1))))
    assert deltas[0] == TextDelta(0, "é", tuple("é".encode()), deltas[0].logprobs)
    for delta in deltas:
        assert tuple(item.token_id for item in delta.logprobs) == delta.token_ids


# ---- ends


def test_a_closed_stream_frees_its_slot(make_service: MakeService) -> None:
    service = make_service(script=endless, gate=threading.Semaphore(1))
    with service.stream(service.prepare_prompt("x")) as stream:
        assert next(stream).text == "a"
    assert engine_of(service).wait_until_idle()
    assert list(stream) == []


def test_a_forgotten_stream_frees_its_slot(make_service: MakeService) -> None:
    service = make_service(script=endless, gate=threading.Semaphore(0))
    stream = service.stream(service.prepare_prompt("x"))
    del stream
    assert engine_of(service).wait_until_idle()

    async def forget() -> None:
        service.astream(service.prepare_prompt("x"))
        gc.collect()

    asyncio.run(forget())
    assert engine_of(service).wait_until_idle()


def test_a_cancelled_task_frees_its_slot(make_service: MakeService) -> None:
    gate = threading.Semaphore(0)
    service = make_service(script=endless, gate=gate)

    async def cancel() -> None:
        task = asyncio.create_task(service.acomplete(service.prepare_prompt("x")))
        await asyncio.to_thread(engine_of(service).wait_for_requests, 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert engine_of(service).wait_until_idle()
    assert engine_of(service).stats().requests_aborted == 1


def test_a_slow_reader_is_cut_off(make_service: MakeService) -> None:
    service = make_service(ServerConfig(max_buffered_events=8), script=endless)
    stream = service.stream(service.prepare_prompt("x"))
    assert engine_of(service).wait_until_idle()
    read: list[str] = []
    with pytest.raises(ReaderTooSlow, match="8 events"):
        read.extend(delta.text for delta in stream)  # keeps what came before the gap
    assert "".join(read) == "abcdefgh"


def test_an_engine_error_is_raised(make_service: MakeService) -> None:
    service = make_service(script=endless, fails_at=3)
    with pytest.raises(EngineFailure, match="the step failed"):
        service.complete(service.prepare_prompt("x"))


def test_closing_the_engine_ends_open_streams(make_service: MakeService) -> None:
    service = make_service(script=endless, gate=threading.Semaphore(1))
    stream = service.stream(service.prepare_prompt("x"))
    next(stream)
    service.close()
    with pytest.raises(EngineFailure):
        list(stream)
    with pytest.raises(EngineFailure):
        service.stream(service.prepare_prompt("x"))


def test_more_than_the_queue_holds_goes_in_turns(make_service: MakeService) -> None:
    service = make_service(max_waiting=3)
    requests = [service.prepare_prompt(f"p{i}") for i in range(20)]
    assert [answer.text for answer in service.complete(*requests)] == [f"P{i}" for i in range(20)]


def test_a_full_queue_is_refused_whole(make_service: MakeService) -> None:
    service = make_service(max_waiting=3, script=endless)
    requests = [service.prepare_prompt(f"p{i}") for i in range(4)]
    with pytest.raises(Overloaded):
        service.stream(*requests)
    assert engine_of(service).wait_until_idle()


def test_a_probe_is_one_token(make_service: MakeService) -> None:
    service = make_service(script=endless)
    asyncio.run(service.probe())
    assert service.stats().generated_tokens == 1
    service.close()
    with pytest.raises(EngineFailure):
        asyncio.run(service.probe())


def test_metrics_count_tokens_and_ends(make_service: MakeService) -> None:
    service, metrics = make_service(script=echo), Metrics()
    service.attach(metrics)
    service.complete(service.prepare_prompt("hello"))
    next(service.stream(service.prepare_prompt("hello")))
    text = metrics.render().decode()
    label = '{model="bytes"}'
    assert f"headrace_time_to_first_token_seconds_count{label} 2.0" in text
    assert f"headrace_inter_token_latency_seconds_count{label} 5.0" in text
    assert 'headrace_request_success_total{finished_reason="stop",model="bytes"} 1.0' in text
    assert 'headrace_request_success_total{finished_reason="abort",model="bytes"} 1.0' in text
    assert f"headrace_kv_pages{label} 100.0" in text
