"""The OpenAI dialect: request bodies to values, answers to JSON-ready dicts; pure.

No sockets, no awaits, no model: `parse_*` turns a decoded body into a frozen request, `render_*`
turns completions and deltas into the shapes of the official client. Everything a request says is
either honoured or refused by name; the sampling parameters beyond OpenAI's keep the names of
`SamplingParams`. Source: OpenAI API reference (chat completions, completions, models), checked
against the types of the `openai` package 3.57.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headrace.errors import HeadraceError, InvalidRequest, Unsupported
from headrace.server import body as read
from headrace.types import Completion, Message, SamplingParams, TextDelta, TokenLogprob, Usage

Json = dict[str, Any]
Prompt = str | tuple[int, ...]
Kind = Literal["chat", "completion"]

_SAMPLING: Mapping[str, read.Reader] = {
    "temperature": read.number,
    "top_k": read.integer,
    "top_p": read.number,
    "min_p": read.number,
    "typical_p": read.number,
    "top_n_sigma": read.number,
    "repetition_penalty": read.number,
    "presence_penalty": read.number,
    "frequency_penalty": read.number,
    "logit_bias": read.token_bias,
    "seed": read.integer,
    "stop": read.strings,
    "stop_token_ids": read.integers,
    "min_tokens": read.integer,
    "max_tokens": read.integer,
    "ignore_eos": read.boolean,
    "n": read.integer,
}
_COMMON = frozenset({"model", "stream", "stream_options", "logprobs", *_SAMPLING})

# Labels: they name the caller or the conversation and change no answer.
_LABELS: Mapping[str, read.Reader] = {
    "user": read.string,
    "safety_identifier": read.string,
    "prompt_cache_key": read.string,
}

# Known to OpenAI, not served here: only values that ask for nothing pass.
_CHAT_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_COMPLETION_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}

# Spellings of other engines: refused, but with the right word.
_HINTS: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
    "n_probs": "logprobs",
    "num_ctx": "the context length is set when the server starts",
    "cache_prompt": "prompts are always cached; answers do not depend on it",
    "prompt": "this route takes 'messages'; raw prompts go to /v1/completions",
    "messages": "this route takes 'prompt'; messages go to /v1/chat/completions",
}

_ROLES = ("system", "developer", "user", "assistant")
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A body of /v1/chat/completions."""

    model: str
    messages: tuple[Message, ...]
    params: SamplingParams
    is_stream: bool = False
    include_usage: bool = False
    template_variables: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A body of /v1/completions; a prompt is text or token ids."""

    model: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    is_stream: bool = False
    include_usage: bool = False


# ---- parsing


def parse_chat(body: Mapping[str, object]) -> ChatRequest:
    """Read a chat body.

    **Raises** `InvalidRequest` with `param` set to the field at fault.
    """
    own = {"messages", "top_logprobs", "max_completion_tokens", "chat_template_kwargs"}
    _check_keys(body, own, _CHAT_NEUTRAL)
    values = _sampling(body)
    values |= _chat_logprobs(body) | _completion_limit(body)
    return ChatRequest(
        model=_model(body),
        messages=_messages(body.get("messages")),
        params=SamplingParams(**values),
        is_stream=_flag(body, "stream"),
        include_usage=_include_usage(body),
        template_variables=_template_variables(body.get("chat_template_kwargs")),
    )


def parse_completion(
    body: Mapping[str, object], max_prompts: int, max_choices: int
) -> CompletionRequest:
    """Read a completions body of at most `max_prompts` prompts and `max_choices` answers.

    **Raises** `InvalidRequest` with `param` set to the field at fault.
    """
    _check_keys(body, {"prompt"}, _COMPLETION_NEUTRAL)
    values = _sampling(body)
    if body.get("logprobs") is not None:
        values["logprobs"] = read.integer("logprobs", body["logprobs"])
    prompts, params = _prompts(body.get("prompt"), max_prompts), SamplingParams(**values)
    if len(prompts) * params.n > max_choices:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n={params.n} are {len(prompts) * params.n} answers; "
            f"one request may have {max_choices}",
            param="n",
        )
    return CompletionRequest(
        model=_model(body),
        prompts=prompts,
        params=params,
        is_stream=_flag(body, "stream"),
        include_usage=_include_usage(body),
    )


def _check_keys(
    body: Mapping[str, object], own: set[str], neutral: Mapping[str, tuple[object, ...]]
) -> None:
    read.refuse_unknown(body, _COMMON | own | set(_LABELS) | set(neutral), _HINTS)
    read.require_neutral(body, neutral)
    for name, reader in _LABELS.items():
        if body.get(name) is not None:
            reader(name, body[name])


def _sampling(body: Mapping[str, object]) -> Json:
    return {
        name: reader(name, body[name])
        for name, reader in _SAMPLING.items()
        if body.get(name) is not None
    }


def _model(body: Mapping[str, object]) -> str:
    if body.get("model") is None:
        raise InvalidRequest("model is missing; GET /v1/models lists what is served", param="model")
    return read.string("model", body["model"])


def _flag(body: Mapping[str, object], name: str) -> bool:
    value = body.get(name)
    return False if value is None else read.boolean(name, value)


def _include_usage(body: Mapping[str, object]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        read.wrong("stream_options", options, "an object")
    if not _flag(body, "stream"):
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    read.refuse_unknown(options, ("include_usage", "include_obfuscation"), {})
    read.require_neutral(options, {"include_obfuscation": (False,)})
    return _flag(options, "include_usage")


def _template_variables(value: object) -> Json:
    """vLLM's and SGLang's name for what a template knows beyond messages (enable_thinking, ...)."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        read.wrong("chat_template_kwargs", value, "an object")
    return value


def _chat_logprobs(body: Mapping[str, object]) -> Json:
    wanted = _flag(body, "logprobs")
    top = body.get("top_logprobs")
    if top is None:
        return {"logprobs": 0} if wanted else {}
    count = read.integer("top_logprobs", top)
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        read.wrong("top_logprobs", count, f"between 0 and {MAX_TOP_LOGPROBS}")
    if not wanted:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return {"logprobs": count}


def _completion_limit(body: Mapping[str, object]) -> Json:
    if body.get("max_completion_tokens") is None:
        return {}
    limit = read.integer("max_completion_tokens", body["max_completion_tokens"])
    if limit < 1:
        read.wrong("max_completion_tokens", limit, "at least 1")
    if body.get("max_tokens") not in (None, limit):
        raise InvalidRequest(
            f"max_tokens is {read.shown(body['max_tokens'])} and max_completion_tokens is {limit}; "
            "they mean the same, send one",
            param="max_completion_tokens",
        )
    return {"max_tokens": limit}


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        read.wrong("messages", value, "a non-empty array of messages")
    return tuple(_message(f"messages[{i}]", item) for i, item in enumerate(value))


def _message(name: str, value: object) -> Message:
    if not isinstance(value, dict):
        read.wrong(name, value, "an object with role and content")
    role = value.get("role")
    if role in ("tool", "function"):
        raise Unsupported(f"{name}: the role {role!r} is not supported yet", param=name)
    if role not in _ROLES:
        read.wrong(f"{name}.role", role, "one of " + ", ".join(_ROLES))
    read.refuse_unknown(value, ("role", "content", "name", "refusal", "tool_calls"), {})
    read.require_neutral(value, {"refusal": (), "tool_calls": ([],)})
    label = value.get("name")
    return Message(
        # OpenAI: "developer" is the newer word for the system role; templates know the older.
        role="system" if role == "developer" else str(role),
        content=_content(f"{name}.content", value.get("content")),
        name=None if label is None else read.string(f"{name}.name", label),
    )


def _content(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        read.wrong(name, value, "a string or an array of text parts")
    # Several parts are joined by newlines, as llama.cpp and vLLM do for plain-text templates.
    return "\n".join(_part(f"{name}[{i}]", part) for i, part in enumerate(value))


def _part(name: str, part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        read.wrong(name, part, 'an object such as {"type": "text", "text": "..."}')
    if part["type"] != "text":
        raise Unsupported(
            f"{name}: content of type {read.shown(part['type'])} is not supported; send text",
            param=name,
        )
    read.refuse_unknown(part, ("type", "text"), {})
    return read.string(f"{name}.text", part.get("text"))


def _prompts(value: object, max_prompts: int) -> tuple[Prompt, ...]:
    allowed = "a string, an array of strings, of token ids, or of arrays of token ids"
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        read.wrong("prompt", value, f"{allowed}; not empty")
    if all(isinstance(item, int) for item in value):
        return (read.integers("prompt", value),)
    if len(value) > max_prompts:
        raise InvalidRequest(
            f"{len(value)} prompts; one request takes up to {max_prompts}", param="prompt"
        )
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if not all(isinstance(item, list) for item in value):
        read.wrong("prompt", value, allowed)
    return tuple(read.integers(f"prompt[{i}]", item) for i, item in enumerate(value))


# ---- rendering


class TokenNames(Protocol):
    """What rendering needs of a vocabulary: what a token adds to the text, and what it is called
    (the same, but for control tokens)."""

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def token_name(self, token_id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer repeats."""

    id: str
    model: str
    created: int
    kind: Kind

    def wrap(self, choices: list[Json], *, is_chunk: bool) -> Json:
        """The outer object around `choices`."""
        objects = {"chat": "chat.completion", "completion": "text_completion"}
        suffix = ".chunk" if is_chunk and self.kind == "chat" else ""
        return {
            "id": self.id,
            "object": objects[self.kind] + suffix,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def render_answer(
    envelope: Envelope, answers: Sequence[Completion], num_choices: int, names: TokenNames
) -> Json:
    """The whole answer, not streamed; `num_choices` consecutive answers share a prompt."""
    choices = [_choice(envelope.kind, index, answer, names) for index, answer in enumerate(answers)]
    usage = render_usage([answer.usage for answer in answers], num_choices)
    return envelope.wrap(choices, is_chunk=False) | {"usage": usage}


def _choice(kind: str, index: int, answer: Completion, names: TokenNames) -> Json:
    choice: Json = {"index": index, "finish_reason": answer.finish_reason, "logprobs": None}
    if kind == "chat":
        choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.logprobs:
            choice["logprobs"] = _chat_logprob_list(answer.logprobs, names)
    else:
        choice["text"] = answer.text
        if answer.logprobs:
            choice["logprobs"] = LegacyLogprobs(names).render(answer.logprobs)
    return choice


def render_usage(usages: Sequence[Usage], num_choices: int) -> Json:
    """Sum over prompts and choices; the `num_choices` choices of a prompt share its tokens."""
    prompts = [usages[i : i + num_choices] for i in range(0, len(usages), num_choices)]
    prompt = sum(group[0].prompt_tokens for group in prompts)
    cached = sum(min(usage.cached_tokens for usage in group) for group in prompts)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Chunks:
    """Renders the chunks of one streamed answer; remembers usage and text offsets per choice."""

    def __init__(
        self, envelope: Envelope, num_choices: int, include_usage: bool, names: TokenNames
    ) -> None:
        self._envelope = envelope
        self._num_choices = num_choices
        self._include_usage = include_usage
        self._names = names
        self._usages: dict[int, Usage] = {}
        self._legacy: dict[int, LegacyLogprobs] = {}

    def open(self, num_answers: int) -> list[Json]:
        """What precedes the first token: in a chat, each choice announces its role."""
        if self._envelope.kind != "chat":
            return []
        role = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(_delta_choice(i, role)) for i in range(num_answers)]

    def delta(self, delta: TextDelta) -> list[Json]:
        """One step of one choice: its text, then its end, as separate chunks."""
        chunks = []
        if delta.text or delta.logprobs:
            chunks.append(self._chunk(self._text_choice(delta)))
        if delta.finish_reason is not None:
            self._usages[delta.index] = delta.usage or Usage()
            chunks.append(self._chunk(self._end_choice(delta)))
        return chunks

    def close(self) -> list[Json]:
        """What follows the last token: usage, when it was asked for."""
        if not self._include_usage:
            return []
        usages = [self._usages[index] for index in sorted(self._usages)]
        last = self._envelope.wrap([], is_chunk=True)
        return [last | {"usage": render_usage(usages, self._num_choices)}]

    def _chunk(self, choice: Json) -> Json:
        chunk = self._envelope.wrap([choice], is_chunk=True)
        return chunk | {"usage": None} if self._include_usage else chunk

    def _text_choice(self, delta: TextDelta) -> Json:
        if self._envelope.kind == "chat":
            choice = _delta_choice(delta.index, {"content": delta.text})
            if delta.logprobs:
                choice["logprobs"] = _chat_logprob_list(delta.logprobs, self._names)
            return choice
        logprobs = None
        if delta.logprobs:
            legacy = self._legacy.setdefault(delta.index, LegacyLogprobs(self._names))
            logprobs = legacy.render(delta.logprobs)
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def _end_choice(self, delta: TextDelta) -> Json:
        if self._envelope.kind == "chat":
            return _delta_choice(delta.index, {}) | {"finish_reason": delta.finish_reason}
        return {
            "index": delta.index,
            "text": "",
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }


def _delta_choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


# JSON has no minus infinity; OpenAI writes this for a token that cannot be drawn.
_LOWEST_LOGPROB = -9999.0


def _chat_logprob_list(logprobs: Sequence[TokenLogprob], names: TokenNames) -> Json:
    content = [
        _named(item.token_id, item.logprob, names)
        | {"top_logprobs": [_named(token, value, names) for token, value in item.top]}
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def _named(token_id: int, logprob: float, names: TokenNames) -> Json:
    raw = names.token_name(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, _LOWEST_LOGPROB),
        "bytes": list(raw),
    }


class LegacyLogprobs:
    """The completions shape: parallel lists, with the offset of each token in the choice's text.

    A token that ends inside a character is named `bytes:\\xe2...`, as OpenAI does; its offset is
    where the character starts.
    """

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def render(self, logprobs: Sequence[TokenLogprob]) -> Json:
        """The lists for the next tokens."""
        return {
            "tokens": [self._name(item.token_id) for item in logprobs],
            "token_logprobs": [max(item.logprob, _LOWEST_LOGPROB) for item in logprobs],
            "top_logprobs": [self._top(item) for item in logprobs],
            "text_offset": [self._advance(item.token_id) for item in logprobs],
        }

    def _name(self, token_id: int) -> str:
        raw = self._names.token_name(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _top(self, item: TokenLogprob) -> Json:
        return {self._name(token): max(value, _LOWEST_LOGPROB) for token, value in item.top}

    def _advance(self, token_id: int) -> int:
        start = self._offset
        self._offset += len(self._decoder.decode(self._names.token_bytes(token_id)))
        return start


def render_model(name: str, created: int, max_context: int | None) -> Json:
    """One entry of the list of models."""
    model = {"id": name, "object": "model", "created": created, "owned_by": "headrace"}
    return model if max_context is None else model | {"context_length": max_context}


def render_models(models: Iterable[Json]) -> Json:
    """The list of models."""
    return {"object": "list", "data": list(models)}


def render_error(error: HeadraceError) -> Json:
    """The error shape of the official client."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }
