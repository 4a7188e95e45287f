"""`headrace bench`: how fast kernels and models run here, beside what the machine could do.

Options become settings of `headrace.bench`, reports become tables (drawn on a terminal, plain lines
in a pipe) and, on request, a JSON file. What is measured, and how, is told there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from headrace.cli.options import NAME_HELP, Commands
from headrace.cli.output import Terminal, say, table
from headrace.cli.tools import Tools
from headrace.errors import InvalidRequest
from headrace.formats.catalogue import DEFAULT_MODEL
from headrace.formats.store import resolve_local

if TYPE_CHECKING:
    from headrace.bench.measuring import Table

BENCH_HELP = "Measure speed beside the machine's own roof."


@dataclass(frozen=True)
class MeasureOptions:
    """How to measure, and where to put it."""

    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is one per core.")] = 0
    repeat: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 5
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the whole report as JSON too."),
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    """What to measure of a model."""

    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt for prefill.")] = 512
    generate: Annotated[int, typer.Option(min=3, help="Tokens of each decoded answer.")] = 128
    batch: Annotated[str, typer.Option(help="Streams that decode together.")] = "1,8,16,32"
    depth: Annotated[str, typer.Option(help="Context before decoding.")] = "0,2048,8000"
    starts: Annotated[int, typer.Option(min=0, help="Fresh processes to start.")] = 5


def numbers(text: str, option: str) -> tuple[int, ...]:
    """`1,8,16`. **Raises** `InvalidRequest`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"--{option} {text!r} is not a list of numbers; example: 1,8,16", param=option
        ) from None


def _kernels(
    measuring: MeasureOptions,
    types: Annotated[str, typer.Option(help="Weight types, such as Q4_1,Q8_0. Default: all.")] = "",
    tokens: Annotated[str, typer.Option(help="Tokens of a step.")] = "1,4,8,64",
    sizes: Annotated[str, typer.Option(metavar="N,K", help="Of a matrix.")] = "2048,2048",
    isa: Annotated[str, typer.Option(help="Default: the widest of this CPU.")] = "",
) -> int:
    """Time every op and weight type.

    Linears and attention run over more memory than the caches hold, through the path a model takes.
    """
    from headrace.bench.kernels import KernelSettings, bench_kernels  # numpy, kernels

    shape = numbers(sizes, "sizes")
    if len(shape) != 2:
        raise InvalidRequest(f"--sizes {sizes!r} is not N,K; example: 1536,576", param="sizes")
    settings = KernelSettings(
        tokens=numbers(tokens, "tokens"),
        rows=shape[0],
        columns=shape[1],
        isa=isa,
        num_threads=measuring.threads,
        repeat=measuring.repeat,
    )
    if types:
        settings = replace(settings, types=tuple(types.split(",")))
    report = bench_kernels(settings, Terminal().note)
    return _finish(report, report.tables(), measuring.json_file)


def _offline(
    ctx: typer.Context,
    shape: ModelOptions,
    measuring: MeasureOptions,
    name: Annotated[str, typer.Argument(metavar="MODEL", help=NAME_HELP)] = DEFAULT_MODEL,
) -> int:
    """Time a model: prefill, decode, verifying drafts, starting, memory.

    The engine itself with greedy sampling and exact lengths, without text and HTTP.
    """
    from headrace.bench.offline import OfflineSettings, bench_offline  # numpy, kernels

    settings = OfflineSettings(
        prompt=shape.prompt,
        generate=shape.generate,
        batches=numbers(shape.batch, "batch"),
        depths=numbers(shape.depth, "depth"),
        num_threads=measuring.threads,
        repeat=measuring.repeat,
        num_starts=shape.starts,
    )
    settings.check()
    tools = ctx.find_object(Tools)
    assert tools is not None, "the application hands its tools down"
    model = resolve_local(name, tools.store())
    report = bench_offline(model.id, model.path, settings, Terminal().note)
    return _finish(report, report.tables(), measuring.json_file)


def _finish(report: Any, tables: tuple[Table, ...], json_file: Path | None) -> int:
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(asdict(report), indent=2) + "\n")
        except OSError as error:
            raise InvalidRequest(f"--json {json_file}: {error}", param="json") from None
    show_tables(tables)
    return 0


def show_tables(tables: tuple[Table, ...]) -> None:
    """Drawn on a terminal, else plain columns."""
    if not sys.stdout.isatty():
        for item in tables:
            heads = [item.heads] if any(item.heads) else []
            say(f"{item.title}\n{table([*heads, *item.rows])}\n\n")
        return
    console = Console()
    for item in tables:
        drawn = RichTable(
            title=item.title, box=box.SIMPLE, title_justify="left", show_header=any(item.heads)
        )
        for head in item.heads:
            drawn.add_column(head)
        for row in item.rows:
            drawn.add_row(*row)
        console.print(drawn)


BENCH_COMMANDS: Commands = {
    "kernels": (
        _kernels,
        (
            "headrace bench kernels",
            "headrace bench kernels --types Q4_1,Q6_K --tokens 1,8 --sizes 1536,576",
            "headrace bench kernels --isa avx2 --json kernels.json",
        ),
    ),
    "offline": (
        _offline,
        (
            "headrace bench offline",
            "headrace bench offline gemma3:270m --batch 1,16 --depth 0 --starts 0",
            "headrace bench offline ./model.gguf --json report.json",
        ),
    ),
}
