"""The OpenAI dialect as fixtures: bodies in, values out; values in, the official types out.

Shapes are checked by the pydantic models of the `openai` package, which is not ours; refusals by
the parameter they name.
"""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.errors import InvalidRequest, ModelNotFound, UnknownParameter, Unsupported
from headrace.server import openai
from headrace.server.body import decode_json
from headrace.types import Completion, Message, SamplingParams, TextDelta, TokenLogprob, Usage

HELLO = [{"role": "user", "content": "hello"}]
TOKENS = {1: b"Hi", 2: b" \xe2", 3: b"\x82\xac", 4: b"!"}


class Names:
    """A vocabulary of four tokens; 2 and 3 share the euro sign."""

    def token_bytes(self, token_id: int, /) -> bytes:
        return TOKENS[token_id]

    def token_name(self, token_id: int, /) -> bytes:
        return TOKENS[token_id]


def chat(**fields: object) -> openai.ChatRequest:
    return openai.parse_chat({"model": "m", "messages": HELLO} | fields)


def completion(**fields: object) -> openai.CompletionRequest:
    return openai.parse_completion({"model": "m", "prompt": "hello"} | fields, 3, 6)


def envelope(kind: openai.Kind) -> openai.Envelope:
    return openai.Envelope("id-1", "m", 1_700_000_000, kind)


def test_every_sampling_parameter_is_read() -> None:
    fields: dict[str, object] = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.8,
        "top_n_sigma": 1.5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logit_bias": {"7": -100, "9": 1.5},
        "seed": 42,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "n": 2,
    }
    expected = SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        typical_p=0.8,
        top_n_sigma=1.5,
        repetition_penalty=1.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias=((7, -100), (9, 1.5)),
        seed=42,
        stop=("a", "b"),
        stop_token_ids=(3,),
        min_tokens=2,
        max_tokens=9,
        ignore_eos=True,
        logprobs=None,
        n=2,
    )
    assert chat(**fields).params == expected
    assert completion(**fields).params == expected


def test_null_means_absent() -> None:
    names = ("temperature", "stop", "seed", "max_tokens", "logit_bias", "stream", "tools", "user")
    assert chat(**dict.fromkeys(names)).params == SamplingParams()


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params.max_tokens == 5
    with pytest.raises(InvalidRequest, match="send one"):
        chat(max_completion_tokens=5, max_tokens=6)


def test_logprobs_in_both_shapes() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat(logprobs=False).params.logprobs is None
    assert completion(logprobs=2).params.logprobs == 2
    with pytest.raises(InvalidRequest, match="needs logprobs"):
        chat(top_logprobs=3)
    with pytest.raises(InvalidRequest, match="between 0 and 20"):
        chat(logprobs=True, top_logprobs=21)


@pytest.mark.parametrize(
    ("given_name", "hint"),
    [
        ("n_predict", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
        ("temprature", "temperature"),
        ("stop_tokens_ids", "stop_token_ids"),
    ],
)
def test_an_unknown_parameter_is_named_with_the_nearest(given_name: str, hint: str) -> None:
    for parse in (chat, completion):
        with pytest.raises(UnknownParameter, match=f"did you mean '{hint}'") as caught:
            parse(**{given_name: 1})
        assert caught.value.param == given_name


def test_the_other_routes_field_is_explained() -> None:
    with pytest.raises(UnknownParameter, match="/v1/completions"):
        chat(prompt="x")
    with pytest.raises(UnknownParameter, match="/v1/chat/completions"):
        completion(messages=HELLO)


@pytest.mark.parametrize(
    ("name", "refused", "neutral"),
    [
        ("tools", [{"type": "function"}], []),
        ("tool_choice", "required", "auto"),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("modalities", ["text", "audio"], ["text"]),
        ("store", True, False),
        ("reasoning_effort", "high", "none"),
        ("metadata", {"a": "b"}, {}),
    ],
)
def test_what_is_not_served_is_refused_unless_neutral(
    name: str, refused: object, neutral: object
) -> None:
    with pytest.raises(Unsupported) as caught:
        chat(**{name: refused})
    assert caught.value.param == name
    assert chat(**{name: neutral}).params == SamplingParams()


@pytest.mark.parametrize(
    ("name", "refused", "neutral"), [("best_of", 2, 1), ("echo", True, False), ("suffix", "x", "")]
)
def test_legacy_parameters(name: str, refused: object, neutral: object) -> None:
    with pytest.raises(Unsupported) as caught:
        completion(**{name: refused})
    assert caught.value.param == name
    assert completion(**{name: neutral}).params == SamplingParams()


def test_one_is_not_true() -> None:
    with pytest.raises(Unsupported):
        completion(echo=0)
    with pytest.raises(Unsupported):
        completion(best_of=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", -1),
        ("top_p", 2),
        ("max_tokens", 0),
        ("max_tokens", 5.0),
        ("n", 0),
        ("n", 65),
        ("n", True),
        ("seed", "x"),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [True]),
        ("logit_bias", [[1, 2]]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": None}),
        ("stream", "yes"),
        ("user", 3),
        ("ignore_eos", 1),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{name: value})
    assert (caught.value.param or "").startswith(name)


def test_stream_options_need_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage
    with pytest.raises(InvalidRequest, match="stream: true"):
        chat(stream_options={"include_usage": True})
    with pytest.raises(UnknownParameter):
        chat(stream=True, stream_options={"usage": True})


def test_messages_become_plain_turns() -> None:
    parsed = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann"},
            {"role": "assistant", "content": "b", "refusal": None},
            {
                "role": "user",
                "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}],
            },
        ]
    )
    assert parsed.messages == (
        Message("system", "be brief"),
        Message("user", "a", "ann"),
        Message("assistant", "b"),
        Message("user", "c\nd"),
    )


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        ["hello"],
        [{"role": "user"}],
        [{"role": "robot", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "colour": "red"}],
    ],
)
def test_bad_messages_are_refused(messages: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.param


def test_prompts_in_four_forms() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))


def test_template_variables_are_an_object() -> None:
    known = {"enable_thinking": False}
    assert chat(chat_template_kwargs=known).template_variables == known
    assert chat(chat_template_kwargs=None).template_variables == {}
    with pytest.raises(InvalidRequest, match="an object"):
        chat(chat_template_kwargs="x")


@pytest.mark.parametrize("prompt", [None, [], 3, ["a", 1], [[1], "a"], [True], [[1.5]], ["a"] * 4])
def test_bad_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert (caught.value.param or "").startswith("prompt")


def test_answers_of_one_request_are_limited() -> None:
    assert completion(prompt=["a", "b", "c"], n=2).params.n == 2
    with pytest.raises(InvalidRequest, match="9 answers"):
        completion(prompt=["a", "b", "c"], n=3)


def test_a_model_must_be_named() -> None:
    with pytest.raises(InvalidRequest, match="/v1/models"):
        openai.parse_chat({"messages": HELLO})


# ---- bodies


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_malformed_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_json(raw)


@pytest.mark.timeout(4)
def test_a_duplicate_key_is_found_in_linear_time() -> None:
    keys = b",".join(b'"k%d":1' % i for i in range(20_000))
    with pytest.raises(InvalidRequest, match='"z" appears twice'):
        decode_json(b"{" + keys + b',"z":1,"z":2}')


@pytest.mark.parametrize("raw", [b'{"%s":1}', b'{"%s":1,"%s":1}'])
def test_refusals_do_not_repeat_a_body(raw: bytes) -> None:
    raw = raw.replace(b"%s", b"x" * 100_000)
    with pytest.raises(InvalidRequest) as caught:
        openai.parse_chat(decode_json(raw))
    assert len(caught.value.message) + len(caught.value.param or "") < 2_000


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_FIELDS = st.sampled_from(
    sorted(openai._COMMON | openai._CHAT_NEUTRAL.keys() | {"messages", "prompt", "top_logprobs"})
)


@given(st.dictionaries(_FIELDS | st.text(), _JSON, max_size=4))
def test_any_body_is_parsed_or_refused(fields: dict[str, object]) -> None:
    for parse in (chat, completion):
        with contextlib.suppress(InvalidRequest):  # any other exception fails the test
            parse(**fields)


# ---- rendering


LOGPROBS = (
    TokenLogprob(1, -0.1, ((1, -0.1), (4, -2.0))),
    TokenLogprob(2, -0.2, ((2, -0.2),)),
    TokenLogprob(3, -0.3, ((3, -0.3),)),
    TokenLogprob(4, float("-inf"), ((1, -0.4),)),
)


def test_a_chat_answer_has_the_official_shape() -> None:
    answer = Completion(0, "Hi €!", (1, 2, 3, 4), "stop", Usage(5, 4, 2), LOGPROBS)
    rendered = openai.render_answer(envelope("chat"), [answer], 1, Names())
    parsed = ChatCompletion.model_validate(rendered, strict=True)
    assert json.loads(json.dumps(rendered, allow_nan=False)) == rendered
    assert parsed.choices[0].message.content == "Hi €!"
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == 9
    assert parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.prompt_tokens_details.cached_tokens == 2
    content = parsed.choices[0].logprobs and parsed.choices[0].logprobs.content
    assert content
    assert [item.token for item in content] == ["Hi", " �", "��", "!"]
    assert content[1].bytes == [0x20, 0xE2]
    assert content[3].logprob == -9999.0
    assert [top.token for top in content[0].top_logprobs] == ["Hi", "!"]


def test_a_completion_answer_has_the_official_shape() -> None:
    answer = Completion(0, "Hi €!", (1, 2, 3, 4), "length", Usage(5, 4, 2), LOGPROBS)
    rendered = openai.render_answer(envelope("completion"), [answer], 1, Names())
    parsed = OpenAICompletion.model_validate(rendered, strict=True)
    choice = parsed.choices[0]
    assert choice.text == "Hi €!"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["Hi", "bytes:\\x20\\xe2", "bytes:\\x82\\xac", "!"]
    assert choice.logprobs.text_offset == [0, 2, 3, 4]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {"Hi": -0.1, "!": -2.0}


def test_usage_counts_a_shared_prompt_once() -> None:
    usages = [Usage(10, 3, 0), Usage(10, 4, 8), Usage(20, 5, 16), Usage(20, 6, 16)]
    assert openai.render_usage(usages, num_choices=2) == {
        "prompt_tokens": 30,
        "completion_tokens": 18,
        "total_tokens": 48,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def stream(kind: openai.Kind, include_usage: bool) -> list[openai.Json]:
    chunks = openai.Chunks(envelope(kind), 1, include_usage, Names())
    deltas = [
        TextDelta(0, "Hi", (1,), LOGPROBS[:1]),
        TextDelta(0, " €!", (2, 3, 4), LOGPROBS[1:], "stop", Usage(5, 4, 2)),
    ]
    return chunks.open(1) + [c for d in deltas for c in chunks.delta(d)] + chunks.close()


def test_chat_chunks_have_the_official_shape() -> None:
    parsed = [
        ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in stream("chat", True)
    ]
    assert parsed[0].choices[0].delta.role == "assistant"
    text = [c.choices[0].delta.content or "" for c in parsed if c.choices]
    assert "".join(text) == "Hi €!"
    assert [c.choices[0].finish_reason for c in parsed if c.choices] == [None, None, None, "stop"]
    assert parsed[-1].choices == []
    assert parsed[-1].usage is not None
    assert parsed[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in parsed[:-1])


def test_completion_chunks_have_the_official_shape() -> None:
    chunks = stream("completion", False)
    parsed = [OpenAICompletion.construct(None, **c) for c in chunks]
    assert "".join(c.choices[0].text for c in parsed) == "Hi €!"
    offsets = [c.choices[0].logprobs.text_offset for c in parsed if c.choices[0].logprobs]
    assert offsets == [[0], [2, 3, 4]]
    assert "usage" not in chunks[-1]


def test_errors_have_the_official_shape() -> None:
    error = ModelNotFound("no such model", param="model")
    assert openai.render_error(error) == {
        "error": {
            "message": "no such model",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
