"""The commands: their options, help and examples; what they do is in the files beside this one.

Exit codes: 0 done, 1 a typed error (one line on standard error, no traceback), 2 wrong usage,
130 interrupted, 141 the reader of standard output went away.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from headrace import __version__
from headrace.cli.bench import BENCH_COMMANDS, BENCH_HELP
from headrace.cli.options import (
    NAME_HELP,
    Command,
    Commands,
    EngineOptions,
    PromptOptions,
    SamplingOptions,
    TalkOptions,
    spread,
)
from headrace.cli.output import Bars, Terminal, say, size
from headrace.cli.run import RunTask, run_model
from headrace.cli.serve import ServeTask, serve_models
from headrace.cli.show import describe_model, list_json, list_text, show_json, show_text
from headrace.cli.tools import Tools
from headrace.config import EngineConfig, ServerConfig
from headrace.errors import HeadraceError
from headrace.formats.catalogue import DEFAULT_MODEL
from headrace.formats.store import (
    list_models,
    list_partial,
    pull,
    remove_model,
    resolve_local,
    verify_model,
)

INTERRUPTED = 130
READER_GONE = 141


_Name = Annotated[str, typer.Argument(metavar="MODEL", help=NAME_HELP)]
_Served = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL", help=f"{NAME_HELP} Default: {DEFAULT_MODEL}.", show_default=False
    ),
]
_Names = Annotated[list[str], typer.Argument(metavar="MODEL", help=NAME_HELP)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


def run_app(args: Sequence[str], tools: Tools | None = None) -> int:
    """Runs one command line; the exit code. `tools` replaces the outside world in tests."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows \uXXXX instead
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _app(tools or Tools())(args=list(args), prog_name="headrace")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _app(tools: Tools) -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "obj": tools},
    )
    app.callback()(_main)
    _register(app, _COMMANDS)
    bench = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=BENCH_HELP)
    _register(bench, BENCH_COMMANDS)
    app.add_typer(bench, name="bench")
    return app


def _register(app: typer.Typer, commands: Commands) -> None:
    for name, (command, examples) in commands.items():
        epilog = "Examples:\n\n" + "\n\n".join(examples)
        app.command(name, epilog=epilog)(_guarded(spread(command)))


def _main(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    """A model file in, a production endpoint out.

    [bold]headrace run "Why is the sky blue?"[/bold] pulls a small model and answers;
    [bold]headrace serve[/bold] offers it as an OpenAI-compatible endpoint.
    """
    if version:
        print(f"headrace {__version__}")
        raise typer.Exit


def _guarded(command: Command) -> Callable[..., None]:
    """A command whose typed errors, interruption and lost reader end it with an exit code."""

    @functools.wraps(command)
    def guarded(**values: Any) -> None:
        raise typer.Exit(_exit_code(command, values))

    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    guarded.__doc__ = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    return guarded


def _exit_code(command: Command, values: dict[str, Any]) -> int:
    try:
        code = command(**values)
        sys.stdout.flush()
    except HeadraceError as error:
        Terminal().error(error.message)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return READER_GONE
    except OSError as error:  # a full disk, a folder that may not be written, a closed stream
        _forget_unwritten()
        parts = error.filename, error.strerror or error
        Terminal().error(": ".join(str(part) for part in parts if part))
        return 1
    return code


def _open_closed_streams() -> None:
    """A process may be started with closed standard streams, and the next file it opened would
    take their place: input is then empty, and writing an answer fails."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


def _forget_unwritten() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _forget_stdout()


def _forget_stdout() -> None:
    """What is still buffered has no reader: Python's own flush at exit must not complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


# ---- commands: each docstring is its help text
#


def _run(
    ctx: typer.Context,
    prompting: PromptOptions,
    sampling: SamplingOptions,
    engine: EngineOptions,
    talk: TalkOptions,
) -> int:
    """Answer a prompt, or chat when there is none.

    A lone argument that names a model starts a chat with it; any other is the prompt. Text piped in
    is the prompt, or follows the PROMPT. The answer goes to standard output, everything else to
    standard error.
    """
    task = RunTask(prompting, sampling, engine, talk)
    return run_model(task, _tools(ctx))


def _serve(
    ctx: typer.Context,
    engine: EngineOptions,
    models: _Served = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = ServerConfig.host,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free.")] = ServerConfig.port,
) -> int:
    """Serve models over HTTP, as OpenAI does.

    Names of the catalogue are the model ids; a path is served under its file's name. The server
    listens at once and answers /ready with 200 when every model can generate.
    """
    task = ServeTask(models or [], host, port, engine)
    return serve_models(task, _tools(ctx), Terminal())


def _pull(
    ctx: typer.Context,
    names: _Names,
    verify: Annotated[
        bool, typer.Option("--verify", help="Sum the files of models already here again.")
    ] = False,
    quiet: _Quiet = False,
) -> int:
    """Fetch models into the store; what is there already is left alone.

    An interrupted pull resumes. Every file's sha256 is checked before the model appears.
    """
    config = _tools(ctx).store()
    terminal = Terminal(quiet)
    with Bars(terminal) as bars:
        for name in names:
            model = pull(name, config, progress=bars)
            if verify:
                verify_model(name, config, progress=bars)
            terminal.note(f"{model.id} is at {model.path}")
    return 0


def _ls(ctx: typer.Context, as_json: _Json = False) -> int:
    """List the models of the store."""
    config = _tools(ctx).store()
    models = list_models(config)
    if as_json:
        say(list_json(models, config) + "\n")
        return 0
    terminal = Terminal()
    if models:
        say(list_text(models, config) + "\n")
    else:
        terminal.note(f"the store {config.root} is empty; headrace pull {DEFAULT_MODEL}")
    for item in list_partial(config):
        terminal.note(
            f"unfinished: {item.id}, {size(item.num_bytes)}; 'headrace pull {item.id}' resumes it, "
            f"'headrace rm {item.id}' deletes it"
        )
    return 0


def _rm(ctx: typer.Context, names: _Names) -> int:
    """Delete models from the store, with their unfinished pulls."""
    config = _tools(ctx).store()
    for name in names:
        freed = remove_model(name, config)
        Terminal().note(f"{name} is removed, {size(freed)} freed")
    return 0


def _show(ctx: typer.Context, name: _Name, as_json: _Json = False) -> int:
    """Tell what a model is: architecture, types, sizes, context, template, memory."""
    tools = _tools(ctx)
    model = resolve_local(name, tools.store())
    found = describe_model(model, tools.open_checkpoint(model.path), EngineConfig().kv_dtype)
    say((show_json(found) if as_json else show_text(found)) + "\n")
    return 0


def _tools(ctx: typer.Context) -> Tools:
    assert isinstance(ctx.obj, Tools), "the application hands its tools down"
    return ctx.obj


_COMMANDS: Commands = {
    "run": (
        _run,
        (
            'headrace run "Why is the sky blue?"',
            "headrace run smollm2:135m",
            'cat notes.txt | headrace run "Summarise this:" --temperature 0',
            'headrace run gemma3:270m "The three laws of" --max-tokens 40',
        ),
    ),
    "serve": (
        _serve,
        (
            "headrace serve",
            "headrace serve smollm2:135m gemma3:270m --port 8080",
            "headrace serve ./model.gguf --threads 2",
        ),
    ),
    "pull": (
        _pull,
        (
            "headrace pull smollm2:135m",
            "headrace pull hf:HuggingFaceTB/SmolLM2-135M-Instruct",
            "headrace pull smollm2:135m --verify",
        ),
    ),
    "ls": (_ls, ("headrace ls", "headrace ls --json")),
    "rm": (_rm, ("headrace rm smollm2:135m",)),
    "show": (_show, ("headrace show smollm2:135m", "headrace show ./model.gguf --json")),
}
