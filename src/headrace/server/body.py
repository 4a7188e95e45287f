"""Bytes of a request body to checked Python values; shared by every dialect.

Not a validation framework: a reader is a function `(name, value) -> value` that returns what the
name promises or raises `InvalidRequest` with the name, what was given and what is allowed. JSON is
read strictly: no NaN, no duplicate keys, no number that Python refuses. Nothing here awaits.
Source: RFC 8259; OpenAI API reference for which fields may be null.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from headrace.errors import InvalidRequest, UnknownParameter, Unsupported

Reader = Callable[[str, object], object]
MAX_SHOWN_CHARS = 80


def decode_json(raw: bytes) -> dict[str, object]:
    """Parse a body that must be one JSON object."""
    try:
        value = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError and oversized integers
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {kind_of(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} appears twice")
        found[name] = value
    return found


def kind_of(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    names = {bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")


def shown(value: object) -> str:
    """A value as it appears in a message: JSON, cut to a bounded length."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


# ---- readers


def wrong(name: str, value: object, allowed: str) -> NoReturn:
    """Refuse a value: what was given, what is allowed."""
    raise InvalidRequest(f"{name} is {shown(value)}; it must be {allowed}", param=name)


def number(name: str, value: object) -> float:
    """An integer or a float; not a boolean, not a string of digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong(name, value, "a number")
    return value


def integer(name: str, value: object) -> int:
    """An integer written without a fraction."""
    if isinstance(value, bool) or not isinstance(value, int):
        wrong(name, value, "an integer")
    return value


def boolean(name: str, value: object) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        wrong(name, value, "true or false")
    return value


def string(name: str, value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        wrong(name, value, "a string")
    return value


def integers(name: str, value: object) -> tuple[int, ...]:
    """An array of integers."""
    if not isinstance(value, list):
        wrong(name, value, "an array of integers")
    return tuple(integer(f"{name}[{i}]", item) for i, item in enumerate(value))


def strings(name: str, value: object) -> tuple[str, ...]:
    """A string or an array of strings."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        wrong(name, value, "a string or an array of strings")
    return tuple(value)


def token_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """An object from token ids (as strings, the JSON form) to numbers."""
    if not isinstance(value, dict):
        wrong(name, value, "an object from token id to bias")
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            wrong(name, value, "an object whose keys are token ids")
    return tuple((int(token), number(f"{name}.{token}", bias)) for token, bias in value.items())


# ---- whole bodies


def refuse_unknown(
    body: Mapping[str, object], known: Iterable[str], hints: Mapping[str, str]
) -> None:
    """Refuse the first key that is not known, with the nearest one that is."""
    names = sorted(known)
    for key in body:
        if key in names:
            continue
        hint = hints.get(key) or next(iter(difflib.get_close_matches(key, names, 1)), None)
        advice = f"did you mean {hint!r}?" if hint in names else hint or _listed(names)
        message = f"unknown parameter {shown(key)}; {advice}"
        raise UnknownParameter(message, param=key[:MAX_SHOWN_CHARS])


def _listed(names: list[str]) -> str:
    return "known parameters: " + ", ".join(names)


def require_neutral(body: Mapping[str, object], neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse parameters we do not serve, except at a value that asks for nothing."""
    for key, allowed in neutral.items():
        value = body.get(key)
        if value is None or any(value == item and type(value) is type(item) for item in allowed):
            continue
        advice = "leave it out"
        if allowed:
            advice += " or send " + " or ".join(shown(item) for item in allowed)
        raise Unsupported(f"{key}={shown(value)} is not supported here; {advice}", param=key)
