"""Typed reads of untrusted metadata (GGUF keys, config.json): every value checked on access.

`Fields` wraps a mapping; each method names the type it wants and the range it allows, and raises a
`FormatError` that names file, key, value and what is allowed. A key whose value is null counts as
missing. Keys read are remembered, so that a model can refuse flags it never looked at (`unread`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from headrace.errors import FormatError


class Fields:
    """Metadata of one file. `source` (a path) opens every message; `prefix` goes before keys.

    A method without a `default` requires the key; with one, returns it (unchecked) when missing.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there and not null; counts as a read."""
        return self._get(key) is not None

    def unread(self) -> list[str]:
        """Keys under `prefix` that nobody has asked for, sorted, prefix removed."""
        mine = (key for key in self.values if key.startswith(self.prefix))
        return sorted(key[len(self.prefix) :] for key in mine if key not in self._read)

    def integer(
        self,
        key: str,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
        default: int | None = None,
    ) -> int:
        """A whole number; bools and floats are refused."""
        if default is not None and not self.has(key):
            return default
        return self._integer(key, self._required(key), minimum, maximum)

    def number(
        self,
        key: str,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
        default: float | None = None,
    ) -> float:
        """A finite number, whole or not."""
        if default is not None and not self.has(key):
            return default
        return self._number(key, self._required(key), minimum, maximum)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """A bool."""
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if not isinstance(value, bool):
            raise self.fail(key, value, "a bool")
        return value

    def text(
        self, key: str, *, choices: Collection[str] | None = None, default: str | None = None
    ) -> str:
        """A string, one of `choices` where given."""
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if not isinstance(value, str):
            raise self.fail(key, value, "a text")
        if choices is not None and value not in choices:
            raise self.fail(key, value, f"one of {', '.join(sorted(choices))}")
        return value

    def integers(
        self,
        key: str,
        length: int | None = None,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
        default: tuple[int, ...] | None = None,
    ) -> tuple[int, ...]:
        """Whole numbers. A single number stands for `length` equal ones, where `length` is given
        (GGUF stores per-layer values either way)."""
        if default is not None and not self.has(key):
            return default
        items = self._items(key, length, "whole numbers", "iu")
        return tuple(self._integer(key, item, minimum, maximum) for item in items)

    def numbers(
        self,
        key: str,
        length: int | None = None,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
        default: tuple[float, ...] | None = None,
    ) -> tuple[float, ...]:
        """Finite numbers; a single one stands for `length` equal ones."""
        if default is not None and not self.has(key):
            return default
        items = self._items(key, length, "numbers", "iuf")
        return tuple(self._number(key, item, minimum, maximum) for item in items)

    def flags(
        self, key: str, length: int | None = None, *, default: tuple[bool, ...] | None = None
    ) -> tuple[bool, ...]:
        """Bools; a single one stands for `length` equal ones."""
        if default is not None and not self.has(key):
            return default
        items = self._items(key, length, "bools", "b")
        for item in items:
            if not isinstance(item, bool):
                raise self.fail(key, item, "bools only")
        return tuple(items)

    def texts(
        self, key: str, length: int | None = None, *, default: tuple[str, ...] | None = None
    ) -> list[str]:
        """Strings, in a list that must not be changed (GGUF vocabularies are not copied)."""
        if default is not None and not self.has(key):
            return list(default)
        value = self._required(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, value, "a list of texts")
        self._check_length(key, value, length)
        return value

    def section(self, key: str) -> Fields:
        """An object inside config.json; missing or null is an empty one."""
        value = self._get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.fail(key, value, "an object")
        return Fields(value or {}, f"{self.source}: {self.prefix}{key}")

    def fail(self, key: str, value: object, allowed: str) -> FormatError:
        """The error for a value that is not allowed; also for checks that callers make."""
        shown = _shown(value)
        return FormatError(f"{self.source}: {self.prefix}{key} is {shown}; it must be {allowed}")

    def _get(self, key: str) -> Any:
        self._read.add(self.prefix + key)
        return self.values.get(self.prefix + key)

    def _required(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise FormatError(f"{self.source}: {self.prefix}{key} is missing")
        return value

    def _integer(self, key: str, value: object, low: int | None, high: int | None) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, value, "a whole number")
        self._check_range(key, value, low, high)
        return value

    def _number(self, key: str, value: object, low: float | None, high: float | None) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, value, "a number")
        if not _is_finite(value):
            raise self.fail(key, value, "a finite number")
        self._check_range(key, value, low, high)
        return float(value)

    def _check_range(self, key: str, value: float, low: float | None, high: float | None) -> None:
        if low is not None and value < low:
            raise self.fail(key, value, f"at least {low}")
        if high is not None and value > high:
            raise self.fail(key, value, f"at most {high}")

    def _items(self, key: str, length: int | None, what: str, numpy_kinds: str) -> list[Any]:
        value = self._required(key)
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in numpy_kinds:
                raise self.fail(key, value, f"a list of {what}")
            value = value.tolist()
        elif not isinstance(value, list):
            if length is None or isinstance(value, str | Mapping):
                raise self.fail(key, value, f"a list of {what}")
            return [value] * length
        self._check_length(key, value, length)
        return list(value)

    def _check_length(self, key: str, value: list[Any], length: int | None) -> None:
        if length is not None and len(value) != length:
            raise FormatError(
                f"{self.source}: {self.prefix}{key} has {len(value)} entries; it must have {length}"
            )


def _shown(value: object) -> str:
    """A value for a message, cut short: it comes from an untrusted file."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond float64
        return False
