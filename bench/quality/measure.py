"""How far an engine's next-token distributions are from the float32 truth, teacher-forced.

The text's first 2,000 tokens (no special tokens) are cut into four windows of 500; each window is a
sequence of its own and starts with the model's beginning token where the model wants one. At each
of the 2,000 text tokens the engine's full row of logits is held against the truth's: KL divergence
in nats, softmax in float64, and whether both have the same most likely token. Shared by the scripts
of this folder; imports no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Logits = Callable[[list[int]], Array]  # one whole sequence -> logits of every position

NUM_TOKENS = 2000
WINDOW = 500
TEXT_CHARS = 20_000  # enough for 2,000 tokens of any vocabulary, few enough to tokenize at once
ROWS_AT_ONCE = 50  # float64 copies of 50 rows of a 262k vocabulary: 0.1 GB each


@dataclass(frozen=True)
class Sample:
    """The sequences to run and the number of leading special tokens in each."""

    windows: tuple[list[int], ...]
    num_leading: int

    @property
    def digest(self) -> str:
        """Two engines with equal digests saw the same tokens."""
        return hashlib.sha256(repr(self.windows).encode()).hexdigest()


def sample(ids: Sequence[int], bos_id: int | None) -> Sample:
    """Windows over a text's token ids; `bos_id` None where the model adds no beginning token."""
    assert len(ids) >= NUM_TOKENS, f"the text has only {len(ids)} tokens"
    lead = [] if bos_id is None else [bos_id]
    starts = range(0, NUM_TOKENS, WINDOW)
    return Sample(tuple(lead + list(ids[i : i + WINDOW]) for i in starts), len(lead))


def read_text(path: Path) -> str:
    """The start of the text."""
    return path.read_text(encoding="utf-8")[:TEXT_CHARS]


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """In float64, over the last axis."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


@dataclass
class Divergence:
    """Grows by windows; then `summary`."""

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)

    def add(self, truth: Array, engine: Array) -> None:
        """**Shapes** both [rows, vocab]."""
        assert truth.shape == engine.shape, (truth.shape, engine.shape)
        for start in range(0, len(truth), ROWS_AT_ONCE):
            p = log_softmax(truth[start : start + ROWS_AT_ONCE])
            q = log_softmax(engine[start : start + ROWS_AT_ONCE])
            self.kl += (np.exp(p) * (p - q)).sum(axis=-1).tolist()
            self.agrees += (p.argmax(axis=-1) == q.argmax(axis=-1)).tolist()

    def summary(self) -> dict[str, Any]:
        """Figures in nats and as a fraction."""
        kl = np.array(self.kl)
        return {
            "num_rows": len(kl),
            "kl_mean": float(f"{kl.mean():.4e}"),
            "kl_median": float(f"{np.median(kl):.4e}"),
            "kl_p99": float(f"{np.quantile(kl, 0.99):.4e}"),
            "argmax_agreement": round(float(np.mean(self.agrees)), 4),
        }


def compare(cases: Sample, truth: Logits, engine: Logits) -> dict[str, Any]:
    """Runs every window through both."""
    result = Divergence()
    for window in cases.windows:
        rows = slice(cases.num_leading, len(window))
        result.add(truth(window)[rows], engine(window)[rows])
        print(f"  {len(result.kl)} rows: {result.summary()}", flush=True)
    return result.summary()


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
