"""Jinja as chat templates use it, in a box: no way out, and no step that cannot be stopped.

Not the renderer (see `chat`). jinja2's sandbox keeps a template from Python's internals but not
from running forever or filling the memory. So every loop, macro and call is made to tick a
`Meter`, every operation that can make something larger than its operands is estimated before it
runs and measured after, and filters and methods that cannot be bounded are left out. Language:
what transformers gives a template (its utils/chat_template_utils.py, version 5).
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from headrace.errors import TemplateError
from headrace.text.metering import (
    MAX_INT_ARGUMENT,
    Meter,
    format_size,
    measure,
    power_size,
    product_size,
    replace_size,
)

_FILTERS = frozenset(
    re.findall(
        r"\w+",
        "abs attr batch capitalize center count d default dictsort e escape first float "
        "forceescape format groupby indent int items join last length list lower map max min "
        "reject rejectattr replace reverse round safe select selectattr slice sort string sum "
        "title tojson trim truncate unique upper wordcount",
    )
)
# Methods of the built-in types a template may call. Left out: what changes a value, what reads
# formats of bytes, and what takes time or room out of proportion (expandtabs, translate, ...).
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        re.findall(
            r"\w+",
            "capitalize casefold center count endswith find format format_map index isalnum "
            "isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
            "istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace "
            "rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip "
            "swapcase title upper zfill",
        )
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
    bytes: frozenset(),
}
# str methods that compare every character of the text with every one of their argument.
_SLOW_SEARCH = frozenset({"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"})
_MAX_SLOW_NEEDLE = 256


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The language. One per template; `metered` lends it a meter for one thread's render."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=_finalize,
        )
        self._local = threading.local()
        self._now = now
        kept = {name: rule for name, rule in self.filters.items() if name in _FILTERS}
        kept |= {
            "tojson": _tojson,
            "join": _join,
            "sum": _sum,
            "indent": _indent,
            "replace": _replace,
        }
        self.filters = {name: _metered_filter(name, rule) for name, rule in kept.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "namespace": _Namespace,
            "dict": _make_dict,
        }

    @contextmanager
    def metered(self, meter: Meter) -> Iterator[None]:
        """Counts what this thread renders inside the block."""
        self._local.meter = meter
        try:
            yield
        finally:
            del self._local.meter

    @property
    def meter(self) -> Meter:
        """The meter of this thread's render."""
        meter: Meter = self._local.meter
        return meter

    # ---- hooks of compiled templates

    def headrace_tick(self, chars: int) -> str:
        """Start of a loop or macro body that holds `chars` characters of plain text."""
        self.meter.charge_chars(chars)
        return ""

    def headrace_same(self, value: object) -> object:
        """Around an operation that jinja does not intercept; `call` measures the result."""
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = __self.meter
        meter.tick()
        _check_call(meter, __obj, args, kwargs)
        args = tuple(_counted(meter, arg) for arg in args)
        result = super().call(__context, __obj, *args, **kwargs)
        meter.charge(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        estimate = {"*": product_size, "**": power_size, "%": format_size}.get(operator)
        if estimate is not None:
            meter.check_size(estimate(left, right, meter.max_chars))
        result = super().call_binop(context, operator, left, right)
        meter.charge(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template, meter = value.__self__, self.meter

        def run(*args: Any, **kwargs: Any) -> str:
            values = (*args, *kwargs.values())
            meter.check_size(format_size(template, values, meter.max_chars))
            return wrapped(*args, **kwargs)

        return run

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        instrumented: nodes.Template = _Instrument(self).visit(tree)
        return instrumented

    def _compile(self, source: str, filename: str) -> CodeType:
        with warnings.catch_warnings():  # Python's remarks on nonsense such as 1.x or 2[0]
            warnings.simplefilter("ignore", SyntaxWarning)
            code: CodeType = super()._compile(source, filename)
        return code

    def _strftime_now(self, format: str) -> str:
        if not isinstance(format, str) or len(format) > 256:
            raise TemplateError("strftime_now takes a format of at most 256 characters")
        return self._now().strftime(format)


def _counted(meter: Meter, value: Any) -> Any:
    """A lazy sequence whose items are counted as they are drawn; other values as they are."""
    return _draw(meter, value) if isinstance(value, Iterator) else value


def _draw(meter: Meter, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        meter.tick()
        meter.charge(item)
        yield item


def _check_call(meter: Meter, function: object, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses arguments that would make a built-in method build something too large."""
    values = (*args, *kwargs.values())
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, str):
        return
    _check_ints(values)
    name = getattr(function, "__name__", "")
    if name == "replace" and len(args) >= 2:
        meter.check_size(replace_size(owner, args[0], args[1]))
    elif name == "join":
        meter.check_size(len(owner) * measure(args, meter.max_chars))
    elif name in _SLOW_SEARCH:
        _check_needle(values)


def _check_needle(values: tuple[object, ...]) -> None:
    if any(isinstance(value, str) and len(value) > _MAX_SLOW_NEEDLE for value in values):
        raise TemplateError(
            "a chat template may strip, group by, or search from the right for, at most "
            f"{_MAX_SLOW_NEEDLE} characters"
        )


def _check_ints(values: tuple[object, ...]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_INT_ARGUMENT:
            raise TemplateError(
                f"a chat template may not pass a number over {MAX_INT_ARGUMENT} to a filter or a "
                "method of text"
            )


class _Instrument(NodeTransformer):
    """Puts the hooks into the syntax tree and refuses what needs other files."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment
        self._chars = 0  # plain text seen so far

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        self._chars += len(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        self._chars += len(node.value) if isinstance(node.value, str) else 0
        return node

    def _body(self, node: Any) -> nodes.Node:
        before = self._chars
        self.generic_visit(node)
        count = nodes.Const(self._chars - before)
        tick = nodes.ExprStmt(self._hook("headrace_tick", count))
        node.body.insert(0, tick.set_lineno(node.lineno).set_environment(self._environment))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = _body  # noqa: N815

    def _wrapped(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # type: ignore[no-any-return]
        hook = self._hook("headrace_same", node)
        return hook.set_lineno(node.lineno).set_environment(self._environment)

    visit_Concat = visit_List = visit_Tuple = visit_Dict = _wrapped  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            return self._wrapped(node)
        self.generic_visit(node)
        return node

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise TemplateError(
            f"the chat template's line {node.lineno} uses {type(node).__name__.lower()}; a "
            "template is one text without other files, and its output is not HTML"
        )

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse  # noqa: N815
    visit_ScopedEvalContextModifier = visit_EvalContextModifier = _refuse  # noqa: N815

    @staticmethod
    def _hook(name: str, argument: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here its
    body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without underscore names and with a short form, whatever it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attrs = dict(*args[1:], **kwargs)
        for name in attrs:
            _check_name(name)
        Namespace.__init__(args[0], attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a chat template may not store the attribute {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise TemplateError(f"the chat template refused the messages: {str(message)[:1000]}")


# ---- filters
#


@pass_context
def _finalize(context: Context, value: Any) -> str:
    """The text of an output expression."""
    environment: Any = context.environment
    environment.meter.charge(value)
    return str(value)


def _metered_filter(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that ticks, refuses huge numbers and measures what it gives."""
    kind = getattr(rule, "jinja_pass_arg", None)

    @pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        environment: Any = context.environment
        meter: Meter = environment.meter
        meter.tick()
        values = (*args[1:], *kwargs.values())
        _check_ints(values)
        if name == "format":
            meter.check_size(format_size(str(args[0]), values, meter.max_chars))
        elif name in ("trim", "groupby"):  # a default for groups is copied for each item
            _check_needle(values)
        args = tuple(_counted(meter, arg) for arg in args)
        result = rule(*_passed(kind, context), *args, **kwargs)
        meter.charge(result)
        return result

    return run


def _passed(kind: Any, context: Context) -> tuple[Any, ...]:
    """What a built-in filter wants as its first argument."""
    if kind is None:
        return ()
    by_name = {
        "context": context,
        "eval_context": context.eval_ctx,
        "environment": context.environment,
    }
    return (by_name[kind.name],)


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, not escaped for HTML as jinja's own filter does."""
    if indent is not None and (indent if isinstance(indent, int) else len(indent)) > 16:
        raise TemplateError("tojson takes an indent of at most 16")
    if separators is not None and any(len(text) > 16 for text in separators):
        raise TemplateError("tojson takes separators of at most 16 characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    environment: Any = context.environment
    meter: Meter = environment.meter
    parts: list[str] = []
    size = 0
    for part in encoder.iterencode(value):
        size += len(part)
        meter.check_size(size)
        parts.append(part)
    return "".join(parts)


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    environment: Any = context.environment
    meter: Meter = environment.meter
    items = list(value)
    meter.check_size(len(str(d)) * len(items) + measure(items, meter.max_chars))
    return str(jinja2.filters.sync_do_join(context.eval_ctx, items, d, attribute))


@pass_context
def _sum(context: Context, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise TemplateError("sum adds numbers only in a chat template")
    return jinja2.filters.sync_do_sum(context.environment, value, attribute, start)


@pass_context
def _indent(
    context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    environment: Any = context.environment
    text, step = str(s), width if isinstance(width, int) else len(width)
    environment.meter.check_size(len(text) + (text.count("\n") + 1) * step)
    return jinja2.filters.do_indent(text, width, first, blank)


@pass_context
def _replace(context: Context, s: Any, old: str, new: str, count: int | None = None) -> str:
    environment: Any = context.environment
    environment.meter.check_size(replace_size(str(s), str(old), str(new)))
    return jinja2.filters.do_replace(context.eval_ctx, s, old, new, count)
