"""What the commands reach out to: the store's settings, the engine, the server.

One object, handed down, so that a test can run the real command line with a slow or failing engine
in place of a real one. The engine's imports wait here until a command needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from headrace.config import EngineConfig, ServerConfig, StoreConfig, store_config
from headrace.types import Checkpoint, EngineStats, Message, Request, SamplingParams, TextDelta

if TYPE_CHECKING:
    from headrace.service import Service
    from headrace.text.chat import ChatTemplate


Listening = Callable[[str, int], None]


class OpenModel(Protocol):
    """What is known of a loaded model."""

    @property
    def name(self) -> str: ...
    @property
    def template(self) -> ChatTemplate | None: ...
    @property
    def max_context(self) -> int: ...
    @property
    def memory(self) -> object:
        """Prints as the sum of what is held."""


class AnswerStream(Protocol):
    """Deltas of one answer; closing it ends the answer."""

    def __iter__(self) -> Iterator[TextDelta]: ...
    def close(self) -> None: ...


class TextService(Protocol):
    """The part of `service.Service` that the command line uses."""

    @property
    def model(self) -> OpenModel: ...
    def prepare_prompt(self, prompt: str, params: SamplingParams) -> Request: ...
    def prepare_chat(self, messages: Sequence[Message], params: SamplingParams) -> Request: ...
    def stream(self, request: Request) -> AnswerStream: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


def _open_service(name: str, checkpoint: Checkpoint, config: EngineConfig) -> TextService:
    from headrace.service import load_checkpoint  # numpy, tokenizers, kernels: not for `ls`

    return cast("TextService", load_checkpoint(name, checkpoint, config))


def _open_checkpoint(path: Path) -> Checkpoint:
    from headrace.formats.checkpoint import open_checkpoint  # numpy

    return open_checkpoint(path)


def _serve(
    loaders: Mapping[str, Callable[[], TextService]], config: ServerConfig, listening: Listening
) -> None:
    from headrace.server.app import serve_loading  # fastapi: only when serving

    serve_loading(cast("Mapping[str, Callable[[], Service]]", loaders), config, listening)


@dataclass(frozen=True)
class Tools:
    """The outside world of a command."""

    store: Callable[[], StoreConfig] = store_config
    open_service: Callable[[str, Checkpoint, EngineConfig], TextService] = _open_service
    open_checkpoint: Callable[[Path], Checkpoint] = _open_checkpoint
    serve: Callable[[Mapping[str, Callable[[], TextService]], ServerConfig, Listening], None] = (
        _serve
    )
