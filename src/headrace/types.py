"""The values that cross layers: frozen, plain, serialisable; no code beyond validation.

A `Request` becomes jobs, a `Plan` moves them, an `Event` reports tokens. Arrays appear here only
as type names: this file
imports nothing heavy, so that `import headrace` stays fast. Protocols at the end say what an
engine, local or remote, offers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]


# ---- model files
#


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in a file: raw bytes plus a block kind, never decoded here.

    **Shapes** `shape` is row-major (slowest first): a linear weight is `(out_features,
    in_features)`; blocks run along the
    last axis. `data` is a read-only uint8 view of exactly `num_bytes(kind, shape)` bytes (usually
    into an mmap).
    `kind` is a name of `formats.blocks.KINDS`, such as "F32", "BF16", "Q4_1", "Q6_K".
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model file or folder, opened: metadata and lazy tensors.

    `dialect` is "gguf" (metadata = GGUF keys) or "hf" (metadata = config.json, merged with
    generation_config.json under
    the key "generation_config"; "tokenizer_json", "tokenizer_config" hold those files parsed,
    "chat_template" its text
    when the folder has one).
    """

    path: str
    dialect: Literal["gguf", "hf"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def with_chat_template(checkpoint: Checkpoint, source: str) -> Checkpoint:
    """The same model with `source` (Jinja text) as its chat template."""
    key = "tokenizer.chat_template" if checkpoint.dialect == "gguf" else "chat_template"
    return replace(checkpoint, metadata={**checkpoint.metadata, key: source})


# ---- requests
#


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Order of application: see `engine/sampler.py`. Neutral defaults switch a
    stage off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not low <= value <= high
            ):
                raise InvalidRequest(
                    f"{name} is {value!r}; it must be between {low} and {high}", param=name
                )
        self._check_integers()
        self._check_lists()

    def _check_integers(self) -> None:
        limits = (("seed", -(2**63), 2**64 - 1), ("max_tokens", 1, 2**31 - 1), ("logprobs", 0, 20))
        for name, low, high in limits:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidRequest(
                    f"{name} is {value!r}; it must be an integer between {low} and {high}",
                    param=name,
                )
        for name in ("top_k", "min_tokens", "n"):
            if not isinstance(getattr(self, name), int):
                raise InvalidRequest(f"{name} must be an integer", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}",
                param="min_tokens",
            )

    def _check_lists(self) -> None:
        for name in ("stop", "stop_token_ids", "logit_bias"):
            if not isinstance(getattr(self, name), tuple):
                raise InvalidRequest(f"{name} must be a tuple", param=name)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos must be true or false", param="ignore_eos")
        if len(self.stop) > MAX_STOP_STRINGS or not all(
            isinstance(s, str) and s for s in self.stop
        ):
            raise InvalidRequest(
                f"stop takes up to {MAX_STOP_STRINGS} strings, none empty", param="stop"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias takes up to {MAX_LOGIT_BIAS} entries", param="logit_bias"
            )
        for entry in self.logit_bias:
            if not _is_bias(entry):
                raise InvalidRequest(
                    f"logit_bias entry {entry!r} is no pair of a token id and a bias from -100 "
                    "to 100",
                    param="logit_bias",
                )


def _is_bias(entry: object) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 2:
        return False
    token, bias = entry
    if isinstance(token, bool) or isinstance(bias, bool):
        return False
    return (
        isinstance(token, int)
        and token >= 0
        and isinstance(bias, int | float)
        and -100.0 <= bias <= 100.0
    )


MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 64
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("top_n_sigma", 0.0, 100.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("min_tokens", 0, 2**31 - 1),
    ("n", 1, MAX_CHOICES),
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; `content` is plain text and never becomes special tokens."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids in, tokens out. `params.n` choices are drawn; choice i differs only in its random
    stream."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


# ---- answers
#


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of the drawn token before any sampling parameter, and of the `top`
    most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one choice; `cached_tokens` of the prompt came from the prefix cache at first
    admission."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One report about one choice of a request: new tokens, or its end, or both.

    The last event of a choice has `finish_reason` and `usage`. An end-of-sequence or stop token is
    included in
    `token_ids` (the service drops it from text). `error` is set when `finish_reason` is "error".
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What the service streams: text of one choice that can no longer change, and the tokens
    behind it."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer of one choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for health checks and metrics; counters grow monotonically."""

    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    page_size: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    step_seconds: float = 0.0


EventSink = Callable[[Event], None]


class EngineClient(Protocol):
    """What the layers above need of an engine, in this process or another."""

    def submit(self, request: Request, sink: EventSink) -> None:
        """Validate and queue; events go to `sink`, called from the engine's thread; it must return
        at once.

        **Raises** `ContextTooLong`, `InvalidRequest`, `Overloaded`, `EngineFailure`.
        """

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End one choice of a request, or (None) every choice, within one step; each open choice
        gets a final "abort" event with its usage. Unknown ids and ended choices: no effect. May be
        called from any thread, also from inside a sink."""

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""

    def close(self) -> None:
        """Stop the thread and free everything; open requests end with an "error" event."""
