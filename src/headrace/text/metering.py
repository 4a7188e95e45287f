"""What a chat template may spend: a clock, an amount of text, and sizes of single values.

A template is a program from a model file, so nothing it builds may be large before it is checked.
`Meter` counts one render; `measure` is the size a value would have written out, shared parts
counted as often as they appear (so a short program cannot hold a value that takes forever to
compare or print). The estimates for single operations are upper bounds, made before they run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView

from headrace.config import TemplateConfig
from headrace.errors import TemplateError

# Text built in one render, kept or not: loops that build a long text bit by bit are quadratic.
_WORK_PER_OUTPUT = 32
_MAX_INT_BITS = 4096
_VALUE_CHARS = 16  # what a value counts beside its text: it takes 8 to 60 bytes and some time
MAX_INT_ARGUMENT = 100_000  # widths, counts, precisions; jinja's own limit for range()
_VIEWS = (KeysView, ValuesView, ItemsView)


class Meter:
    """Counts one render against the limits. **Raises** `TemplateError` when one is passed."""

    def __init__(self, config: TemplateConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_chars = config.max_output_chars
        self._work_left = _WORK_PER_OUTPUT * config.max_output_chars
        self._output_left = config.max_output_chars
        self._timeout_s = config.timeout_s
        self._clock = clock
        self._deadline = clock() + config.timeout_s

    def tick(self) -> None:
        """Called at every step of a loop and every call: the time limit."""
        if self._clock() > self._deadline:
            raise TemplateError(
                f"the chat template ran longer than {self._timeout_s} s and was stopped"
            )

    def charge(self, value: object) -> None:
        """Counts a value that an operation has made."""
        size = measure(value, self.max_chars)
        self.check_size(size)
        self.charge_chars(size)

    def charge_chars(self, count: int) -> None:
        """Counts text that has been made, given out or not."""
        self._work_left -= count
        if self._work_left < 0:
            raise TemplateError(
                "the chat template builds too much text; at most "
                f"{_WORK_PER_OUTPUT * self.max_chars} characters over one render are allowed"
            )

    def output(self, text: str) -> str:
        """Counts text of the result."""
        self.tick()
        self._output_left -= len(text)
        if self._output_left < 0:
            raise TemplateError(
                f"the chat template's output is over {self.max_chars} characters and was stopped"
            )
        return text

    def check_size(self, size: int) -> None:
        """Refuses a value that is, or would be, over the limit."""
        if size > self.max_chars:
            raise TemplateError(
                "the chat template makes a value that is too large; at most "
                f"{self.max_chars} characters are allowed"
            )


def measure(value: object, limit: int) -> int:
    """Characters `value` takes written out, roughly; stops counting past `limit`."""
    if isinstance(value, str):
        return len(value) + _VALUE_CHARS
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        total += _VALUE_CHARS
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int) and item.bit_length() > _MAX_INT_BITS:
            return limit + 1  # arithmetic on it would take time out of proportion
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, *_VIEWS)):
            stack.extend(item)
    return total


# ---- estimates: what an operation would make, before it runs
#


def product_size(left: object, right: object, limit: int) -> int:
    """Size of `left * right`."""
    if isinstance(left, int) and isinstance(right, int):
        return _int_size(left.bit_length() + right.bit_length(), limit)
    if isinstance(left, int):
        left, right = right, left
    if not isinstance(right, int):
        return 0
    return (len(left) if isinstance(left, str) else measure(left, limit)) * max(right, 0)


def power_size(left: object, right: object, limit: int) -> int:
    """Size of `left ** right`."""
    if isinstance(left, int) and isinstance(right, int):
        return _int_size(left.bit_length() * max(right, 0), limit)
    return 0


def _int_size(bits: int, limit: int) -> int:
    return 1 if bits <= _MAX_INT_BITS else limit + 1


def format_size(template: object, values: object, limit: int) -> int:
    """Size of `template % values` or `template.format(values)`: every field may repeat every
    value, every number may be a width."""
    if not isinstance(template, str):
        return 0
    if re.search(r"%[^a-zA-Z%]*\*|\{[^{}:]*:[^{}]*\{", template):  # a width that is computed
        return limit + 1
    widths = sum(int(digits[:9]) for digits in re.findall(r"\d+", template))
    fields = template.count("%") + template.count("{")
    return len(template) + widths + fields * measure(values, limit)


def replace_size(text: str, old: object, new: object) -> int:
    """Size of `text.replace(old, new)`."""
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * len(new)
