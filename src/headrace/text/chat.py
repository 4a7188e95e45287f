"""Chat templates: messages to the model's own prompt text, and that text to token ids.

The language and its limits are in `sandbox`; here are the template of a file and the rule that
text in messages never becomes special tokens: whatever in a message spells one is broken up by a
sentinel character before rendering, special tokens are looked for in the result, and the sentinel
is dropped from the rest. So the template's own marks count and the same text in a message does
not. Semantics follow transformers' apply_chat_template; a beginning token is never doubled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from types import MappingProxyType
from typing import Any

import jinja2

from headrace.config import TemplateConfig
from headrace.errors import ContextTooLong, FormatError, InvalidRequest, TemplateError
from headrace.text.messages import Plain, plain_messages, plain_value, texts_of
from headrace.text.metering import Meter
from headrace.text.sandbox import TemplateEnvironment
from headrace.text.tokenizer import Tokenizer
from headrace.types import Checkpoint, Message

# What a template may do wrong, beside jinja's own errors: everything Python raises for bad values.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,  # RecursionError too
    SyntaxError,
    TypeError,
    ValueError,
)
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_NO_TEMPLATE = (
    "this model has no chat template (a base model, or a file that lost it). Give one with "
    "--chat-template FILE (in Python: chat_template=TEXT), use an instruct version of the model, "
    "or complete a raw prompt"
)


class ChatTemplate:
    """One compiled template. Any thread may render it.

    `special_tokens` are the names it can use (bos_token, eos_token, ...). `now` is its clock for
    strftime_now. **Raises** `TemplateError` when it cannot be compiled.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        config: TemplateConfig = TemplateConfig(),  # noqa: B008 frozen
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        raw = source.encode("utf-8")
        if len(raw) > config.max_template_bytes:
            raise TemplateError(
                f"the chat template has {len(raw)} bytes; at most {config.max_template_bytes} "
                "are allowed"
            )
        self.source = source
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self.special_tokens = dict(special_tokens)
        self._config = config
        self._environment = TemplateEnvironment(now)
        self._template = self._compile()

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text. `variables` are further names the template knows (enable_thinking...).

        **Raises** `TemplateError` when the template refuses the messages, fails, or passes its
        limits; `InvalidRequest` for messages that are none.
        """
        plain = plain_messages(messages)
        return self.render_plain(_names(plain, add_generation_prompt, tools, variables))

    def render_plain(self, names: Plain) -> str:
        """`render` for names that are checked already."""
        meter = Meter(self._config)
        meter.charge(names)
        names = self.special_tokens | names
        try:
            with self._environment.metered(meter):
                return "".join(map(meter.output, self._template.generate(names)))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template failed: {_reason(error)}") from None
        except _FAILURES as error:
            raise TemplateError(
                f"the chat template failed: {type(error).__name__}: {_reason(error)}"
            ) from None

    def _compile(self) -> jinja2.Template:
        try:
            with self._environment.metered(Meter(self._config)):
                return self._environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is wrong in line {error.lineno}: {_reason(error)}"
            ) from None
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise TemplateError(f"the chat template is wrong: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(error)[:1000] or type(error).__name__


def _names(
    messages: list[Plain],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> Plain:
    taken = sorted(_RESERVED & variables.keys())
    if taken:
        raise InvalidRequest(f"template variables {', '.join(taken)} are set by their own options")
    names: Plain = plain_value(variables, "template variables")
    return names | {
        "messages": messages,
        "tools": None if tools is None else plain_value(tools, "tools"),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }


# ---- templates of a file
#


def load_chat_template(
    checkpoint: Checkpoint,
    name: str | None = None,
    config: TemplateConfig = TemplateConfig(),  # noqa: B008 frozen
) -> ChatTemplate | None:
    """The model's chat template, or a named variant of it; None when the file has none.

    **Raises** `TemplateError` when it cannot be compiled or the variant does not exist.
    """
    sources = template_sources(checkpoint)
    if name is not None and name not in sources:
        known = ", ".join(sorted(sources)) or "none"
        raise TemplateError(f"{checkpoint.path} has no chat template {name!r}; it has: {known}")
    source = sources.get(name or "default")
    if source is None:
        return None
    return ChatTemplate(source, _special_texts(checkpoint), config)


def template_sources(checkpoint: Checkpoint) -> dict[str, str]:
    """Texts of all templates of a file by name; the main one is "default"."""
    if checkpoint.dialect == "gguf":
        found = _gguf_sources(checkpoint.metadata)
    else:
        found = _hf_sources(checkpoint.metadata)
    for name, source in found.items():
        if not isinstance(source, str):
            raise FormatError(f"{checkpoint.path}: chat template {name!r} is not a text")
    return found


def _gguf_sources(metadata: Mapping[str, Any]) -> dict[str, Any]:
    key = "tokenizer.chat_template"
    found = {"default": metadata[key]} if key in metadata else {}
    variants = (k for k in metadata if k.startswith(key + "."))
    return found | {k.removeprefix(key + "."): metadata[k] for k in variants}


def _hf_sources(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """From the folder's chat_template file, or tokenizer_config.json: a text, or a list of
    {name, template}."""
    config = metadata.get("tokenizer_config")
    listed = config.get("chat_template") if isinstance(config, Mapping) else None
    found: dict[str, Any] = {}
    if isinstance(listed, list):
        entries = (entry for entry in listed if isinstance(entry, Mapping))
        found = {str(entry.get("name")): entry.get("template") for entry in entries}
    elif listed is not None:
        found = {"default": listed}
    own = metadata.get("chat_template")
    return found if own is None else found | {"default": own}


def _special_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """bos_token and its kin. A GGUF template gets "" for a missing bos or eos, as in llama.cpp."""
    if checkpoint.dialect == "hf":
        config = checkpoint.metadata.get("tokenizer_config")
        items = config.items() if isinstance(config, Mapping) else ()
        named = ((name, value) for name, value in items if name.endswith("_token"))
        contents = (
            (name, value.get("content") if isinstance(value, Mapping) else value)
            for name, value in named
        )
        return {name: text for name, text in contents if isinstance(text, str)}
    texts = {"bos_token": "", "eos_token": ""}
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens", ())
    keys = {"unknown": "unk", "seperator": "sep", "padding": "pad"}
    for key in ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask"):
        token_id = checkpoint.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            texts[f"{keys.get(key, key)}_token"] = tokens[token_id]
    return texts


# ---- ids
#


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    max_tokens: int | None = None,
) -> list[int]:
    """Messages as token ids: the template's special tokens count, those spelt in a message do not.
    A text that must have more than `max_tokens` is refused before the work of encoding it.

    **Raises** `TemplateError` without a template or when it fails, `ContextTooLong`,
    `InvalidRequest`.
    """
    if template is None:
        raise TemplateError(_NO_TEMPLATE)
    plain = plain_messages(messages)
    _check_roles(plain, tokenizer)
    names = _names(plain, add_generation_prompt, tools, variables)
    sentinel = _sentinel(names, template.source)
    text = template.render_plain(_broken(names, tokenizer, sentinel))
    if max_tokens is not None:
        check_length(tokenizer.least_tokens(text, sentinel), max_tokens, "messages")
    ids = tokenizer.encode_marked(text, sentinel)
    bos = tokenizer.chat_bos_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def check_length(least: int, max_tokens: int, param: str) -> None:
    """**Raises** `ContextTooLong` for a prompt whose tokens need no counting."""
    if least > max_tokens:
        raise ContextTooLong(
            f"the prompt has at least {least} tokens; the context holds {max_tokens} with the "
            "answer. Shorten the prompt",
            param=param,
        )


def _check_roles(messages: list[Plain], tokenizer: Tokenizer) -> None:
    """A role that a template would make into an end token is none."""
    for message in messages:
        role = message["role"]
        for text in (f"<|{role}|>", f"<{role}>", f"[{role}]"):
            if tokenizer.special_tokens.get(text) in tokenizer.eos_ids:
                raise InvalidRequest(f"role {role!r} is not allowed: {text} ends a turn")


def _sentinel(names: Plain, source: str) -> str:
    """A private-use character that none of the texts has."""
    texts = [source, *texts_of(names)]
    for code in chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)):
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise InvalidRequest("the messages use every private-use character of Unicode")


def _broken(value: Any, tokenizer: Tokenizer, sentinel: str) -> Any:
    """A copy of a plain value in which no text spells a special token."""
    if isinstance(value, str):
        return tokenizer.breaker.apply(value, sentinel)
    if isinstance(value, dict):
        return {
            tokenizer.breaker.apply(key, sentinel): _broken(item, tokenizer, sentinel)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_broken(item, tokenizer, sentinel) for item in value]
    return value
