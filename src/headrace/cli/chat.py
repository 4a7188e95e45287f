"""The chat on a terminal: history, several lines, commands; Ctrl-C stops the answer only.

The whole conversation goes to the model each turn; the engine's prefix cache makes that cheap.
Line editing and history across runs come from readline where Python has it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.cli.answer import prepare, report, speeds, stream_answer
from headrace.cli.output import Terminal, say
from headrace.cli.sampling import describe
from headrace.cli.tools import TextService
from headrace.errors import EngineFailure, HeadraceError, InvalidRequest
from headrace.types import Message, SamplingParams

readline: ModuleType | None
try:
    import readline
except ImportError:  # a Python without it still chats
    readline = None

HISTORY_LINES = 1000
FENCE = '"""'

HELP = '''/help                 this text
/clear                forget the conversation
/set NAME VALUE       a sampling parameter, such as: /set temperature 0
/set system TEXT      the system text of this conversation
/set verbose|quiet    print speeds after each answer, or not
/show                 the model, the parameters, the system text
/bye                  leave, as Ctrl-D does
""" ... """           a message of several lines
Ctrl-C                stop the answer'''


@dataclass
class Chat:
    """A conversation; `messages` grows, everything else changes by /set."""

    service: TextService
    name: str
    params: SamplingParams
    is_raw: bool
    system: str | None
    is_verbose: bool
    messages: list[Message] = field(default_factory=list)


def chat(session: Chat, terminal: Terminal, history: Path) -> int:
    """Reads and answers until the end of input; the exit code."""
    _load_history(history)
    terminal.note(f"{session.name}: /help for commands, /bye or Ctrl-D to leave")
    try:
        while True:
            text = _read_message(terminal)
            if text is None or text.strip() in ("/bye", "/exit", "/quit"):
                return 0
            if text.strip():
                _turn(session, text, terminal)
    finally:
        _save_history(history)


def _turn(session: Chat, text: str, terminal: Terminal) -> None:
    try:
        if text.startswith("/"):
            terminal.console.print(_command(session, text.strip()), markup=False)
        else:
            _answer(session, text, terminal)
    except EngineFailure:
        raise
    except HeadraceError as error:
        terminal.error(error.message)


def _answer(session: Chat, text: str, terminal: Terminal) -> None:
    message = Message("user", text)
    system = [Message("system", session.system)] if session.system else []
    asked = [*system, *([] if session.is_raw else session.messages), message]
    request = prepare(session.service, asked, session.params, session.is_raw)
    answer = stream_answer(session.service, request)
    session.messages += [message, Message("assistant", answer.text)]
    report(answer, terminal, session.params)
    if session.is_verbose:
        terminal.note(speeds(answer, session.service))
    say("\n")


# ---- commands
#


def _command(session: Chat, text: str) -> str:
    """Carries out a /command; what to tell. **Raises** `InvalidRequest`."""
    word, _, rest = text.partition(" ")
    if word in ("/help", "/?"):
        return HELP
    if word == "/clear":
        session.messages.clear()
        return "the conversation is forgotten"
    if word == "/show":
        return _show(session)
    if word == "/set":
        return _set(session, rest.strip())
    raise InvalidRequest(f"no command {word}; /help lists them")


def _show(session: Chat) -> str:
    kind = "completes prompts as they are" if session.is_raw else "chats by its template"
    return "\n".join(
        [
            f"model    {session.name}, {kind}",
            f"context  {session.service.model.max_context} tokens",
            f"sampling {describe(session.params)}",
            f"system   {session.system or '-'}",
            f"messages {len(session.messages)}",
        ]
    )


def _set(session: Chat, text: str) -> str:
    name, _, value = text.partition(" ")
    if name == "parameter":  # as other chats write it
        name, _, value = value.partition(" ")
    value = value.strip()
    if name in ("verbose", "quiet"):
        session.is_verbose = name == "verbose"
        return f"{name} it is"
    if name == "system":
        session.system = value or None
        return f"the system text is {value!r}; /clear starts afresh with it"
    session.params = replace(session.params, **{name: _value(name, value)})
    return f"sampling {describe(session.params)}"


def _value(name: str, text: str) -> Any:
    kinds = {item.name: item.type for item in fields(SamplingParams)}
    settable = sorted(set(kinds) - {"n", "logprobs", "logit_bias", "stop_token_ids"})
    if name not in settable:
        raise InvalidRequest(
            f"no parameter {name!r}; there are: {', '.join(settable)}, system, verbose, quiet"
        )
    kind = str(kinds[name])
    if "None" in kind and text.lower() == "none":
        return None
    try:
        return _convert(kind, text)
    except (ValueError, KeyError):
        raise InvalidRequest(f"{name} takes a value like {kind}, not {text!r}") from None


def _convert(kind: str, text: str) -> Any:
    if kind.startswith("tuple"):
        return (text,) if text else ()
    if kind.startswith("bool"):
        return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
    return int(text) if kind.startswith("int") else float(text)


# ---- the keyboard
#


def _read_message(terminal: Terminal) -> str | None:
    """The next message; None at the end of input. Ctrl-C at the prompt drops the line."""
    try:
        text = _read_line(">>> ")
        if not text.lstrip().startswith(FENCE):
            return text
        text = text.lstrip()[len(FENCE) :]
        while not text.rstrip().endswith(FENCE):
            text += "\n" + _read_line("... ")
        return text.rstrip()[: -len(FENCE)].strip("\n")
    except EOFError:
        say("\n")
        return None
    except KeyboardInterrupt:
        say("\n")
        terminal.note("Ctrl-D or /bye leaves")
        return ""


def _read_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return input()


def _load_history(path: Path) -> None:
    if readline is None:
        return
    readline.set_history_length(HISTORY_LINES)
    try:
        readline.read_history_file(path)
    except OSError:
        readline.clear_history()


def _save_history(path: Path) -> None:
    if readline is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)
    except OSError:
        return
