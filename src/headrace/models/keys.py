"""Typed reading of checkpoint metadata: required, optional and asserted keys, and no others.

`Keys` remembers what was read; `finish` refuses what was not. So a flag that changes the
mathematics and that a family does not know is an error, never silently dropped. Works on GGUF
metadata (one architecture prefix) and on config.json alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any

from headrace.errors import FormatError, UnsupportedModel


class Keys:
    """A view of the keys under `prefix`; mutates only its record of keys read.

    A key whose value is null counts as absent. **Raises** `FormatError` for a missing or
    ill-typed value, `UnsupportedModel` for a value or key that is not known.
    """

    def __init__(self, metadata: Mapping[str, Any], prefix: str, where: str) -> None:
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._prefix = prefix
        self._where = where
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """How messages call a key."""
        return f"{self._where}: {self._prefix}{key}"

    def has(self, key: str) -> bool:
        """Whether a key has a value; does not count as reading it."""
        return self._values.get(key) is not None

    def says_null(self, key: str) -> bool:
        """Whether a key is there with the value null."""
        return key in self._values and self._values[key] is None

    def raw(self, key: str) -> Any:
        """The value, unchecked, as plain Python; None when absent."""
        self._read.add(key)
        value: Any = self._values.get(key)
        return value.tolist() if hasattr(value, "tolist") else value  # numpy's, from a GGUF reader

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer within bounds (an array of equal integers counts as one)."""
        value = self._single(key)
        if value is None:
            value = self._missing(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise FormatError(
                f"{self.name(key)} is {short(value)}; it must be an integer from {low} to {high}"
            )
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number within bounds."""
        value = self.raw(key)
        if value is None:
            value = self._missing(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{self.name(key)} is {short(value)}; it must be a number")
        if not math.isfinite(value) or not low <= value <= high:
            raise FormatError(
                f"{self.name(key)} is {short(value)}; it must be from {low} to {high}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{self.name(key)} is {short(value)}; it must be true or false")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A required list of `length` positive finite numbers."""
        value = self.raw(key)
        if value is None:
            self._missing(key, None)
        if not isinstance(value, list) or len(value) != length:
            raise FormatError(f"{self.name(key)} must be a list of {length} numbers")
        for x in value:
            if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < math.inf:
                raise FormatError(f"{self.name(key)} has the entry {short(x)}; it must be above 0")
        return tuple(float(x) for x in value)

    def choices(self, key: str, length: int, allowed: Iterable[Any]) -> tuple[Any, ...] | None:
        """A list of `length` entries, each one of `allowed`, or None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise FormatError(f"{self.name(key)} must be a list of {length} entries")
        allowed = list(allowed)
        for x in value:
            if x not in allowed:
                raise UnsupportedModel(
                    f"{self.name(key)} has the entry {short(x)}; known: {_listing(allowed)}"
                )
        return tuple(value)

    def expect(self, key: str, *allowed: Any) -> Any:
        """Assert that a key is absent or has one of the `allowed` values; returns it or None."""
        value = self.raw(key)
        if value is not None and value not in allowed:
            raise UnsupportedModel(
                f"{self.name(key)} is {short(value)}; headrace knows {_listing(allowed)}"
            )
        return value

    def table(self, key: str) -> Keys | None:
        """A nested table as its own `Keys` (call `finish` on it), or None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise FormatError(f"{self.name(key)} is {short(value)}; it must be a table")
        return Keys(value, "", f"{self._where}: {key}")

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse keys never read, but for those known not to change the mathematics."""
        unknown = sorted(set(self._values) - self._read - set(harmless))
        if unknown:
            names = ", ".join(
                f"{self._prefix}{key} = {short(self._values[key])}" for key in unknown[:8]
            )
            raise UnsupportedModel(
                f"{self._where}: {len(unknown)} unknown key(s): {names}; they may change what "
                "the model computes, so the model is refused"
            )

    def _missing(self, key: str, default: Any) -> Any:
        if default is None:
            raise FormatError(f"{self.name(key)} is missing")
        return default

    def _single(self, key: str) -> Any:
        value = self.raw(key)
        if isinstance(value, list | tuple) and value:
            if any(x != value[0] for x in value):
                raise UnsupportedModel(f"{self.name(key)} differs between layers: {short(value)}")
            return value[0]
        return value


def _listing(values: Iterable[Any]) -> str:
    return ", ".join(repr(value) for value in values)
