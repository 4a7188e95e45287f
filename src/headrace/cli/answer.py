"""One answer on standard output: streamed as it settles, timed, and never longer than asked.

Used by the one-shot run and by the chat. On a terminal, control characters of an answer are shown
as text: a model's output must not drive the reader's terminal. In a pipe every byte goes through.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.cli.output import Terminal, say
from headrace.cli.tools import TextService
from headrace.errors import InvalidRequest
from headrace.observe import monotonic_s
from headrace.types import FinishReason, Message, Request, SamplingParams, Usage

# A small model that loops would fill its whole context; a longer answer is asked for by name.
DEFAULT_MAX_TOKENS = 2048

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_VISIBLE = {code: text for code, text in _CONTROL.items() if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came; `finish_reason` None means interrupted."""

    text: str
    finish_reason: FinishReason | None
    usage: Usage
    first_s: float
    total_s: float


def prepare(
    service: TextService, messages: Sequence[Message], params: SamplingParams, is_raw: bool
) -> Request:
    """The request of a chat, or of the last message as a bare prompt."""
    if is_raw:
        if any(message.role == "system" for message in messages):
            raise InvalidRequest(
                f"a system text needs a chat template; {service.model.name} runs without one here, "
                "so put the text into the prompt",
                param="system",
            )
        request = service.prepare_prompt(messages[-1].content, params)
    else:
        request = service.prepare_chat(messages, params)
    if params.max_tokens is None:
        limit = min(DEFAULT_MAX_TOKENS, request.params.max_tokens or DEFAULT_MAX_TOKENS)
        request = replace(request, params=replace(request.params, max_tokens=limit))
    return request


def stream_answer(service: TextService, request: Request) -> Answer:
    """Prints the answer. A Ctrl-C ends it: what came is returned, unless it is to travel on.

    **Raises** `EngineFailure`; `BrokenPipeError` when nobody reads.
    """
    is_terminal = sys.stdout.isatty()
    text: list[str] = []
    reason: FinishReason | None = None
    usage = Usage(prompt_tokens=len(request.prompt_token_ids))
    start_s = monotonic_s()
    first_s = None
    stream = service.stream(request)
    try:
        for delta in stream:
            if first_s is None:
                first_s = monotonic_s() - start_s
            text.append(delta.text)
            say(delta.text.translate(_VISIBLE) if is_terminal else delta.text)
            reason, usage = delta.finish_reason or reason, delta.usage or usage
    except KeyboardInterrupt:
        reason = None
    finally:
        stream.close()
    total_s = monotonic_s() - start_s
    if not text or not text[-1].endswith("\n"):
        say("\n")
    return Answer("".join(text), reason, usage, first_s or total_s, total_s)


def report(answer: Answer, terminal: Terminal, params: SamplingParams) -> None:
    """Why it ended, when that is not the model's own end."""
    if answer.finish_reason == "length":
        limit = answer.usage.completion_tokens
        if params.max_tokens is None:
            terminal.warn(f"the answer was cut after {limit} tokens; --max-tokens N allows more")
        else:
            terminal.note(f"stopped after {limit} tokens, as --max-tokens says")
    elif answer.finish_reason == "abort":
        terminal.warn("the engine ended the answer early")


def speeds(answer: Answer, service: TextService) -> str:
    """The table of --verbose."""
    usage = answer.usage
    fresh = usage.prompt_tokens - usage.cached_tokens
    decode_s = answer.total_s - answer.first_s
    stats = service.stats()
    held = (stats.num_pages - stats.num_free_pages) * stats.page_size
    lines = [
        f"prompt   {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
        f"{answer.first_s:.3f} s to the first, {_rate(fresh, answer.first_s)}",
        f"answer   {usage.completion_tokens} tokens, {decode_s:.3f} s, "
        f"{_rate(usage.completion_tokens - 1, decode_s)}",
        f"KV       {held} of {stats.num_pages * stats.page_size} tokens held",
    ]
    return "\n".join(lines)


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tokens/s" if count > 0 and seconds > 0 else "- tokens/s"
