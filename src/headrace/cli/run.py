"""`headrace run`: which word is the model and which the prompt, what comes from a pipe, and then
one answer or a chat.

A lone argument is a model when it resolves, a prompt when it does not look like a name, and an
error when it looks like a name that resolves to nothing: a typing error must not become a prompt.
"""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.cli.answer import prepare, report, speeds, stream_answer
from headrace.cli.chat import Chat, chat
from headrace.cli.options import EngineOptions, PromptOptions, SamplingOptions, TalkOptions
from headrace.cli.output import Bars, Terminal
from headrace.cli.sampling import choose_params, describe
from headrace.cli.tools import TextService, Tools
from headrace.errors import InvalidRequest
from headrace.formats.catalogue import DEFAULT_MODEL, find
from headrace.formats.names import is_name_like, parse_name
from headrace.formats.store import installed_ids, resolve
from headrace.observe import monotonic_s
from headrace.types import Message, SamplingParams

MAX_PIPED_BYTES = 8 << 20
# With a PROMPT, an open pipe that says nothing may be a script's idle input: waited for this long.
PIPE_WAIT_S = 3.0

INTERRUPTED = 130


@dataclass(frozen=True)
class RunTask:
    """The command line of `run`, parsed."""

    prompting: PromptOptions
    sampling: SamplingOptions
    engine: EngineOptions
    talk: TalkOptions


def run_model(task: RunTask, tools: Tools) -> int:
    """Resolves, loads, answers; the exit code."""
    terminal = Terminal(task.talk.quiet)
    task.sampling.check()
    engine_config = task.engine.config()
    config = tools.store()
    name, prompt = split_words(task.prompting.words, installed_ids(config))
    parse_name(name, installed_ids(config))  # a misspelt name is refused before anything is read
    if prompt is None and not sys.stdin.isatty():
        prompt = _read_pipe()
        if not prompt.strip():
            raise InvalidRequest("the prompt is empty: standard input brought no text")
    with Bars(terminal) as bars:
        model = resolve(name, config, progress=bars)
    start_s = monotonic_s()
    checkpoint = task.engine.applied(tools.open_checkpoint(model.path))
    params = choose_params(task.sampling.given(), model.id, checkpoint.metadata)
    service = tools.open_service(model.id, checkpoint, engine_config)
    try:
        _introduce(task, service, terminal, params, monotonic_s() - start_s)
        is_raw = task.prompting.raw or service.model.template is None
        if prompt is None:
            session = Chat(
                service, model.id, params, is_raw, task.prompting.system, task.talk.verbose
            )
            return chat(session, terminal, config.root / "history")
        return _answer_once(task, _add_pipe(prompt, terminal), service, terminal, params)
    finally:
        service.close()


def split_words(words: Sequence[str], installed: Iterable[str]) -> tuple[str, str | None]:
    """`[MODEL] [PROMPT]` as (model, prompt or None).

    **Raises** `InvalidRequest` for an empty word.
    """
    if any(not word.strip() for word in words):
        raise InvalidRequest("the prompt is empty; leave it out for a chat")
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return DEFAULT_MODEL, None
    word = words[0]
    installed = list(installed)
    if find(word) or word in installed or is_name_like(word, installed):
        return word, None
    return DEFAULT_MODEL, word


def _read_pipe() -> str:
    found = sys.stdin.buffer.read(MAX_PIPED_BYTES + 1)
    if len(found) > MAX_PIPED_BYTES:
        raise InvalidRequest(
            f"standard input brings more than {MAX_PIPED_BYTES >> 20} MiB; no model reads that much"
        )
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 text (byte {error.start}); convert it first, for example "
            "with iconv"
        ) from None


def _add_pipe(prompt: str, terminal: Terminal) -> str:
    """The prompt, and after a blank line what was piped in beside it."""
    if not _has_pipe(terminal):
        return prompt
    piped = _read_pipe()
    return f"{prompt}\n\n{piped}" if piped.strip() else prompt


def _has_pipe(terminal: Terminal) -> bool:
    if sys.stdin is None or sys.stdin.isatty():
        return False
    try:
        fd = sys.stdin.fileno()
        mode = os.fstat(fd).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISREG(mode):
        return True
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    ready, _, _ = select.select([fd], [], [], PIPE_WAIT_S)
    if not ready:
        terminal.warn(
            f"standard input is a pipe that brought nothing in {PIPE_WAIT_S:g} s; the prompt is "
            "answered alone"
        )
    return bool(ready)


def _introduce(
    task: RunTask,
    service: TextService,
    terminal: Terminal,
    params: SamplingParams,
    load_s: float,
) -> None:
    if service.model.template is None and not task.prompting.raw:
        terminal.note(
            f"{service.model.name} has no chat template (a base model): the prompt is completed "
            "as it is"
        )
    if task.talk.verbose:
        terminal.note(f"load     {load_s:.3f} s, context {service.model.max_context} tokens")
        terminal.note(str(service.model.memory))
        terminal.note(f"sampling {describe(params)}")


def _answer_once(
    task: RunTask,
    prompt: str,
    service: TextService,
    terminal: Terminal,
    params: SamplingParams,
) -> int:
    is_raw = task.prompting.raw or service.model.template is None
    system = task.prompting.system
    messages = [Message("system", system)] if system is not None else []
    messages.append(Message("user", prompt))
    answer = stream_answer(service, prepare(service, messages, params, is_raw))
    if answer.finish_reason is None:
        return INTERRUPTED
    report(answer, terminal, params)
    if task.talk.verbose:
        terminal.note(speeds(answer, service))
    return 0
