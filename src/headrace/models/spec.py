"""What a decoder is: its sizes, and how each layer attends. Values only, no weights, no reading.

Only what several families share stands here; what one family alone has is in that family's file.
Every size is bounded where it is read (`models/keys.py`), so a spec can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.backends.ops import Activation, Rope


@dataclass(frozen=True)
class LayerSpec:
    """How one layer attends. `rope` None: no position embedding (NoPE). `window` 0: everything
    before; otherwise a query sees itself and window - 1 keys before it."""

    rope: Rope | None
    window: int = 0


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer.

    `context_length` is what the file says it was made for. `attention_scale` multiplies q.k,
    `embedding_scale` the embedded tokens. A softcap of 0 is none. `layers` has `num_layers`
    entries. `is_tied`: the embedding is the head too.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    attention_scale: float
    activation: Activation
    layers: tuple[LayerSpec, ...]
    is_tied: bool
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim
