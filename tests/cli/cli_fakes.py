"""A command line whose engine is a script: what it answers is known, and it can hang or never end.

Run as a program (`python cli_fakes.py ANSWER ARGS...`) it is the real command line in a real
process, for signals, pipes and terminals.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from headrace.cli.app import run_app
from headrace.cli.tools import Listening, OpenModel, TextService, Tools
from headrace.config import EngineConfig, ServerConfig, StoreConfig
from headrace.types import (
    Checkpoint,
    EngineStats,
    FinishReason,
    Message,
    Request,
    SamplingParams,
    TextDelta,
    Usage,
)

CONTEXT = 100
Script = Callable[[Request], Iterator[str]]


def fixed(*pieces: str) -> Script:
    """Always the same answer."""
    return lambda request: iter(pieces)


def hanging(request: Request) -> Iterator[str]:
    """One word, then silence."""
    yield "first"
    threading.Event().wait()


def endless(request: Request) -> Iterator[str]:
    """Lines without end."""
    while True:
        yield "tick\n"


class FakeStream:
    """Deltas of a script's pieces, one token each."""

    def __init__(self, pieces: Iterator[str], request: Request) -> None:
        self.is_closed = False
        self._pieces = pieces
        self._request = request

    def __iter__(self) -> Iterator[TextDelta]:
        limit = self._request.params.max_tokens or CONTEXT
        count = 0
        reason: FinishReason = "stop"
        for count, text in enumerate(self._pieces, 1):
            yield TextDelta(0, text, (count,))
            if count == limit:
                reason = "length"
                break
        usage = Usage(len(self._request.prompt_token_ids), count)
        yield TextDelta(0, "", (), finish_reason=reason, usage=usage)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeService:
    """A `TextService`; `asked` and `requests` keep what came in."""

    script: Script
    has_template: bool = True
    asked: list[tuple[Message, ...]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    is_closed: bool = False

    @property
    def model(self) -> OpenModel:
        template = SimpleNamespace() if self.has_template else None
        found = SimpleNamespace(
            name="fake", template=template, max_context=CONTEXT, memory="12 MiB in all"
        )
        return cast("OpenModel", found)

    def prepare_prompt(self, prompt: str, params: SamplingParams) -> Request:
        self.asked.append((Message("raw", prompt),))
        return self._request(params)

    def prepare_chat(self, messages: Sequence[Message], params: SamplingParams) -> Request:
        self.asked.append(tuple(messages))
        return self._request(params)

    def _request(self, params: SamplingParams) -> Request:
        return Request("r", (1, 2, 3), replace(params, max_tokens=params.max_tokens or CONTEXT - 3))

    def stream(self, request: Request) -> FakeStream:
        self.requests.append(request)
        return FakeStream(self.script(request), request)

    def stats(self) -> EngineStats:
        return EngineStats(num_pages=10, num_free_pages=9, page_size=16)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeWorld:
    """Tools around one fake service, and what was opened and served."""

    root: Path
    service: FakeService
    metadata: dict[str, Any] = field(default_factory=dict)
    opened: list[tuple[str, EngineConfig]] = field(default_factory=list)
    templates: list[str | None] = field(default_factory=list)
    served: dict[str, TextService] = field(default_factory=dict)
    server_config: ServerConfig | None = None

    def tools(self) -> Tools:
        return Tools(
            store=lambda: StoreConfig(root=self.root, is_offline=True),
            open_service=self._open,
            open_checkpoint=lambda path: Checkpoint(str(path), "gguf", self.metadata, {}),
            serve=self._serve,
        )

    def _open(self, name: str, checkpoint: Checkpoint, config: EngineConfig) -> TextService:
        self.opened.append((name, config))
        self.templates.append(checkpoint.metadata.get("tokenizer.chat_template"))
        return self.service

    def _serve(
        self,
        loaders: Mapping[str, Callable[[], TextService]],
        config: ServerConfig,
        listening: Listening,
    ) -> None:
        self.server_config = config
        listening(config.host, config.port)
        self.served = {name: load() for name, load in loaders.items()}


SCRIPTS: Mapping[str, Script] = {
    "hanging": hanging,
    "endless": endless,
    "fixed": fixed("one ", "two"),
}

if __name__ == "__main__":
    world = FakeWorld(Path(sys.argv[1]), FakeService(SCRIPTS[sys.argv[2]]))
    sys.exit(run_app(sys.argv[3:], world.tools()))
