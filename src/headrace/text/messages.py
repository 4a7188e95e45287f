"""Chat messages as a template gets them: checked, copied, plain.

No rendering here. Callers give `types.Message` values or mappings as the OpenAI API has them; a
template gets dicts, lists, texts, numbers, bools and None, nothing with methods of ours. A content
of text parts becomes one text (parts on lines of their own, as llama.cpp and vLLM join them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest
from headrace.text.tokenizer import check_text
from headrace.types import Message

MAX_DEPTH = 64
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")

Plain = dict[str, Any]


def plain_messages(messages: Sequence[Message | Mapping[str, Any]]) -> list[Plain]:
    """Messages for a template.

    **Raises** `InvalidRequest` that names the message: a missing or odd role, a content that is
    not text, a part of another type than text, values that are not JSON.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list of messages", param="messages")
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Message | Mapping[str, Any], where: str) -> Plain:
    if isinstance(message, Message):
        named = {} if message.name is None else {"name": message.name}
        message = {"role": message.role, "content": message.content, **named}
    if not isinstance(message, Mapping):
        raise _bad(where, f"is {type(message).__name__}; it must be an object")
    copied: Plain = plain_value(message, where)
    role = copied.get("role")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise _bad(
            where, f"has role {str(role)[:80]!r}; it must be a word such as user or assistant"
        )
    if "content" not in copied and "tool_calls" not in copied:
        raise _bad(where, "has no content")
    copied["content"] = _content(copied.get("content"), where)
    return copied


def _content(content: object, where: str) -> str:
    if content is None:
        return ""  # an assistant message that only calls tools
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, f"has content of type {type(content).__name__}; it must be text")
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise _bad(where, f"is of type {str(kind)[:80]!r}; this model takes parts of type 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise _bad(where, "has no text")
    return text


def plain_value(value: object, where: str, depth: int = 0) -> Any:
    """A deep copy made of JSON's types. **Raises** `InvalidRequest` for any other."""
    if depth > MAX_DEPTH:
        raise _bad(where, f"is nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        check_text(value)
        return str(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _bad(where, "has a key that is not text")
        return {
            plain_value(key, where, depth): plain_value(item, f"{where}.{key[:80]}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise _bad(where, f"is {type(value).__name__}; it must be JSON")


def texts_of(value: object) -> Iterator[str]:
    """Every string in a plain value, keys included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _bad(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param="messages")
