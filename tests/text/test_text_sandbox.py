"""A template is an untrusted program: it must neither get out nor go on.

Each bomb ends in a `TemplateError` well within a second (the time limit of these tests is 0.3 s),
because it is refused before it is built, not because the machine gave way.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from headrace.config import TemplateConfig
from headrace.errors import TemplateError
from headrace.text.chat import ChatTemplate
from headrace.text.metering import measure
from headrace.types import Message

CONFIG = TemplateConfig(max_output_chars=1 << 20, timeout_s=0.3)
MESSAGES = [Message("user", "hello")]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, config=CONFIG).render(MESSAGES, variables=variables)


def doubled(start: str, step: str) -> str:
    """A program that makes 2^64 of something, a step at a time."""
    loop = "{% for i in range(64) %}{% set ns.x = STEP %}{% endfor %}"
    return "{% set ns = namespace(x=START) %}".replace("START", start) + loop.replace("STEP", step)


def lazy(filters: str) -> str:
    """A program that draws 99,999 times one long text, none of them stored."""
    return "{{ range(99999) | map(attribute='x', default='a' * 900000) | FILTERS }}".replace(
        "FILTERS", filters
    )


ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}x{% endfor %}{% endfor %}",
    "{% macro f() %}{% for i in range(99999) %}{{ '' }}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{{ f() }}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | select('divisibleby', 7) | list | length }}"
    "{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{% for x in [1, 2] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) }}{% endif %}"
    "{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% block b %}{% if loop_end is not defined %}{% for i in range(9) %}{{ self.b() }}"
    "{% endfor %}{% endif %}{% endblock %}",
    "{% macro f(n) %}{% if n %}{% call g() %}{{ f(n - 1) }}{% endcall %}{% endif %}{% endmacro %}"
    "{% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}{{ f(60) }}",
]
LARGE = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 2 ** (10**9) }}",
    "{{ 10**1000 * 10**1000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%1000000000s' | format('x') }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "{% set f = '{:1000000000}'.format %}{{ [1] | map('default') | list }}{{ f(1) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '1'.zfill(10**9) }}",
    "{{ 'a'.expandtabs(10**9) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ ('a' * 100000).join('b' * 100000) }}",
    "{{ range(99999) | join('a' * 100000) }}",
    "{{ ('\\n' * 100000) | indent(100000) }}",
    "{{ messages | tojson(indent=100000000) }}",
    "{{ messages | tojson(separators=('a' * 100000, ':')) }}",
    "{{ 1.5 | round(10**9, 'floor') }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ range(10**9) }}",
    doubled("'a'", "ns.x ~ ns.x"),
    doubled("'a'", "ns.x + ns.x"),
    doubled("['a']", "ns.x + ns.x"),
    doubled("['a']", "[ns.x, ns.x]") + "{{ ns.x == ns.x }}",
    doubled("()", "(ns.x, ns.x)"),
    doubled("{}", "{1: ns.x, 2: ns.x}"),
    doubled("{}", "dict(a=ns.x, b=ns.x)"),
    "{% set big = 'a' * 1000000 %}{% set x %}{% for i in range(99999) %}{{ big }}{% endfor %}"
    "{% endset %}",
    "{% set big = 'a' * 1000000 %}{% for i in range(99999) %}{{ big }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "{% macro f() %}"
    + "x" * 9999
    + "{% endmacro %}{% for i in range(9999) %}{{ f() }}{% endfor %}",
    "{% filter upper %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endfilter %}",
    "{% set s = 'a' * 1000000 %}{% set ns = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set ns.x = ns.x + [s[1:]] %}{% endfor %}",
    "{{ ('a' * 400000).rfind('b' + 'a' * 200000) }}",
    "{{ ('a' * 400000).strip('b' * 400000 + 'a') }}",
    "{{ 'a' * 400000 | trim('b' * 400000 + 'a') }}",
    "{{ ('a' * 400000) | trim(chars='b' * 400000 + 'a') }}",
    "{{ ('a' * 100000) | replace(old='a', new='b' * 100000) }}",
    "{% set x = ('f' * 900000) | int(base=16) %}{{ x // 3 % 2 }}",
    "{{ ('{' + ':' * 900000).format() }}",
    "{{ ('a' * 900000) | groupby('x', 'a' * 900000) }}",
    lazy("join"),
    lazy("sort"),
    lazy("unique | list"),
    lazy("list"),
    lazy("min"),
    "{{ ''.join(range(99999) | map(attribute='x', default='a' * 900000)) }}",
]


def cpu_and_time(source: str) -> float:
    start = time.perf_counter()
    with pytest.raises(TemplateError):
        render(source)
    return time.perf_counter() - start


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_templates_are_stopped(source: str) -> None:
    assert cpu_and_time(source) < 3.0  # 0.3 s of its own and what a busy machine adds


@pytest.mark.parametrize("source", LARGE)
def test_large_values_are_refused_before_they_exist(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert cpu_and_time(source) < 3.0
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 << 10  # the limit here is 1 Mi characters


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ [].append.__self__.__class__ }}",
    "{{ ('' | attr('__class__')).x }}",
    "{{ messages['__class__'].x }}",
    "{{ ([''] | map(attribute='__class__') | list)[0].x }}",
    "{{ '{0.__class__.__mro__}'.format('').x }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ strftime_now.__func__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{% macro m() %}{% endmacro %}{{ m._environment.x }}",
    "{% for x in [1] %}{{ loop._iterable.x }}{{ loop.__class__.x }}{% endfor %}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages.clear() }}",
    "{{ ''.encode().hex() }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
    "{% autoescape true %}{% endautoescape %}",
    "{{ lipsum(n=1000) }}",
    "{{ messages | pprint }}",
    "{{ 'x' | urlize }}",
    "{{ [1, 2] | random }}",
    "{{ headrace_tick(1) }}",
    "{{ environment.meter.x }}",
    "{{ strftime_now('%Y' * 1000) }}",
    "{{ ().x.y }}",
    "{{ 1 / 0 }}",
    "{{ {}['x'].y }}",
    "{{ 'a' + 1 }}",
    "{{ messages | nosuchfilter }}",
    "{{ messages is nosuchtest }}",
    "{{ nosuchfunction() }}",
    "{% if %}",
    "{% do messages %}",
    "{{ raise_exception('no') }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{{ x" + ".y" * 20000 + " }}",
]


@pytest.mark.parametrize("source", ESCAPES, ids=range(len(ESCAPES)))
def test_what_is_out_of_reach_ends_in_a_typed_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0[__class__]}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '' | attr('__class__') }}",
        "{{ [''] | map(attribute='__class__') | join }}",
    ],
)
def test_hidden_attributes_print_nothing(source: str) -> None:
    assert render(source) == ""


def test_nonsense_is_compiled_without_remarks() -> None:
    """Python warns of `2[0]`; warnings are errors here."""
    with pytest.raises(TemplateError, match="not subscriptable"):
        render("{{ 2[0:1] }}")


def test_undefined_names_print_nothing() -> None:
    assert render("[{{ nothing }}]") == "[]"


def test_the_messages_of_the_caller_stay_as_they_are() -> None:
    message = {"role": "user", "content": "x", "tool_calls": [1]}
    chat = ChatTemplate("{% set messages = [] %}{% for m in messages %}{% endfor %}")
    chat.render([message])
    assert message == {"role": "user", "content": "x", "tool_calls": [1]}


def test_a_render_leaves_nothing_for_the_next() -> None:
    chat = ChatTemplate("{% if x is defined %}old{% endif %}{% set x = 1 %}{{ n }}")
    assert [chat.render(MESSAGES, variables={"n": n}) for n in (1, 2)] == ["1", "2"]


def test_output_is_limited() -> None:
    config = TemplateConfig(max_output_chars=1000)
    assert ChatTemplate("x" * 1000, config=config).render(MESSAGES) == "x" * 1000
    with pytest.raises(TemplateError, match="output is over 1000 characters"):
        ChatTemplate("x" * 1001, config=config).render(MESSAGES)


def test_messages_over_the_limit_are_refused() -> None:
    with pytest.raises(TemplateError, match="too large"):
        ChatTemplate("", config=TemplateConfig(max_output_chars=1000)).render(
            [Message("user", "x" * 1000)]
        )


def test_ordinary_work_stays_far_from_the_limits() -> None:
    """A thousand long turns, joined bit by bit as some templates do."""
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.role ~ ': ' ~ m.content ~ '\\n' %}{% endfor %}{{ ns.text }}"
    )
    messages = [Message("user", "word " * 20)] * 1000
    assert len(ChatTemplate(source).render(messages)) == 1000 * len("user: \n" + "word " * 20)


def test_measure_counts_shared_parts_each_time() -> None:
    shared: list[Any] = ["x" * 100]
    assert measure([shared] * 10, 10**6) > 1000
    assert measure({"k": "v" * 50}, 10**6) > 50
    for _ in range(100):
        shared = [shared, shared]
    assert measure(shared, 1000) > 1000  # and stops there
