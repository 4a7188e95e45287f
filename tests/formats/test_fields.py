"""Typed reads of metadata: accepted values, defaults, and refusals that name the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.errors import FormatError
from headrace.formats.fields import Fields

VALUES: dict[str, Any] = {
    "m.count": 4,
    "m.eps": 1e-5,
    "m.on": True,
    "m.name": "silu",
    "m.null": None,
    "m.heads": np.array([4, 4, 2], np.uint32),
    "m.list": [1, 2],
    "m.factors": np.array([1.5, 2.0], np.float32),
    "m.pattern": np.array([True, False]),
    "m.bools": [True, False],
    "m.texts": ["a", "b"],
    "m.nan": float("nan"),
    "m.huge": 10**400,
    "m.mixed": [1, "x"],
    "m.object": {"kind": "yarn"},
    "other": 1,
}


@pytest.fixture
def fields() -> Fields:
    return Fields(VALUES, "model.gguf", "m.")


Read = Callable[[Fields], object]

GOOD: list[tuple[Read, object]] = [
    (lambda f: f.integer("count"), 4),
    (lambda f: f.integer("count", minimum=4, maximum=4), 4),
    (lambda f: f.integer("missing", default=7), 7),
    (lambda f: f.integer("null", default=7), 7),
    (lambda f: f.number("eps"), 1e-5),
    (lambda f: f.number("count"), 4.0),
    (lambda f: f.number("missing", default=0.5), 0.5),
    (lambda f: f.flag("on"), True),
    (lambda f: f.flag("missing", default=False), False),
    (lambda f: f.text("name"), "silu"),
    (lambda f: f.text("name", choices=("gelu", "silu")), "silu"),
    (lambda f: f.text("missing", default="none"), "none"),
    (lambda f: f.integers("heads", 3), (4, 4, 2)),
    (lambda f: f.integers("list"), (1, 2)),
    (lambda f: f.integers("count", 3), (4, 4, 4)),
    (lambda f: f.integers("missing", 2, default=(1, 1)), (1, 1)),
    (lambda f: f.numbers("factors", 2), (1.5, 2.0)),
    (lambda f: f.numbers("heads"), (4.0, 4.0, 2.0)),
    (lambda f: f.numbers("eps", 2), (1e-5, 1e-5)),
    (lambda f: f.flags("pattern", 2), (True, False)),
    (lambda f: f.flags("bools"), (True, False)),
    (lambda f: f.flags("on", 2), (True, True)),
    (lambda f: f.texts("texts"), ["a", "b"]),
    (lambda f: f.texts("missing", default=()), []),
    (lambda f: f.section("object").text("kind"), "yarn"),
    (lambda f: f.section("null").has("kind"), False),
    (lambda f: f.has("null"), False),
    (lambda f: f.has("nan"), True),
]


@pytest.mark.parametrize(("read", "expected"), GOOD)
def test_values_of_the_right_type_are_read(fields: Fields, read: Read, expected: object) -> None:
    value = read(fields)
    assert value == expected
    assert type(value) is type(expected)


BAD: list[tuple[Read, str]] = [
    (lambda f: f.integer("missing"), "m.missing is missing"),
    (lambda f: f.integer("null"), "m.null is missing"),
    (lambda f: f.integer("eps"), "m.eps is 1e-05; it must be a whole number"),
    (lambda f: f.integer("on"), "m.on is True; it must be a whole number"),
    (lambda f: f.integer("name", default=3), "m.name is 'silu'"),
    (lambda f: f.integer("count", minimum=5), "m.count is 4; it must be at least 5"),
    (lambda f: f.integer("count", maximum=3), "m.count is 4; it must be at most 3"),
    (lambda f: f.integer("heads"), "m.heads is an array of 3 uint32"),
    (lambda f: f.number("name"), "it must be a number"),
    (lambda f: f.number("on"), "it must be a number"),
    (lambda f: f.number("nan"), "m.nan is nan; it must be a finite number"),
    (lambda f: f.number("huge"), "m.huge is a number of 1329 bits"),
    (lambda f: f.number("eps", minimum=1e-3), "at least 0.001"),
    (lambda f: f.flag("count"), "m.count is 4; it must be a bool"),
    (lambda f: f.text("count"), "it must be a text"),
    (lambda f: f.text("name", choices=("relu", "gelu")), "one of gelu, relu"),
    (lambda f: f.integers("heads", 2), "m.heads has 3 entries; it must have 2"),
    (lambda f: f.integers("heads", minimum=3), "m.heads is 2; it must be at least 3"),
    (lambda f: f.integers("factors"), "an array of 2 float32; it must be a list of whole"),
    (lambda f: f.integers("pattern"), "an array of 2 bool"),
    (lambda f: f.integers("bools"), "is True; it must be a whole number"),
    (lambda f: f.integers("mixed"), "m.mixed is 'x'"),
    (lambda f: f.integers("count"), "m.count is 4; it must be a list"),
    (lambda f: f.integers("name", 2), "m.name is 'silu'; it must be a list"),
    (lambda f: f.numbers("pattern"), "an array of 2 bool"),
    (lambda f: f.flags("heads"), "an array of 3 uint32"),
    (lambda f: f.flags("list"), "m.list is 1; it must be bools only"),
    (lambda f: f.texts("mixed"), "m.mixed is a list of 2; it must be a list of texts"),
    (lambda f: f.texts("name"), "it must be a list of texts"),
    (lambda f: f.texts("texts", 3), "m.texts has 2 entries; it must have 3"),
    (lambda f: f.section("list"), "m.list is a list of 2; it must be an object"),
    (lambda f: f.section("object").integer("x"), "model.gguf: m.object: x is missing"),
]


@pytest.mark.parametrize(("read", "words"), BAD)
def test_other_values_are_refused_by_name(fields: Fields, read: Read, words: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(fields)
    assert words in caught.value.message
    assert caught.value.message.startswith("model.gguf: ")


def test_keys_nobody_asked_for_are_listed() -> None:
    fields = Fields({"m.a": 1, "m.b": 2, "other": 3}, "f", "m.")
    assert fields.unread() == ["a", "b"]
    fields.integer("b")
    assert fields.unread() == ["a"]


def test_long_hostile_values_are_cut_short_in_messages() -> None:
    with pytest.raises(FormatError) as caught:
        Fields({"a": "x" * 10_000}, "f").integer("a")
    assert len(caught.value.message) < 200
