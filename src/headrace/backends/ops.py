"""The Ops protocol: the vocabulary models are written in; shapes and formulas, no code.

Three backends speak it: `reference` (numpy, the meaning of every op), `cpu` (C++) and later
`torch`. An op takes and returns opaque tensors whose first axis is the rows of the step (tokens,
or the rows asked for); models never look inside. A backend may run an op at once (reference) or
record it for replay (cpu), so models must not branch on values and must not keep tensors between
forwards.

**Shapes** T = tokens of the step over all sequences, S = sequences, R = rows whose logits are
wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrace.types import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Tensor = Any  # a backend's own activation handle; has `.shape` (first axis may be symbolic)
Weight = Any  # a backend's own weight handle; has `.shape`
Activation = Literal["silu", "gelu_tanh", "gelu"]

PAGE_SIZE = 16  # tokens per KV page: one AVX-512 register of keys; kernels are compiled for it


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer.

    **Shapes** `inv_freq` [rotary_dim / 2] float64, all scaling already applied. Angle = position *
    inv_freq.
    `interleaved`: pairs are (x[2i], x[2i+1]) (GGUF "llama"); otherwise (x[i], x[i + rotary_dim/2])
    (Hugging Face).
    `factor` multiplies cos and sin (YaRN / longrope attention factor). Elements past rotary_dim
    are left as they are.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool
    factor: float = 1.0


@dataclass(frozen=True)
class KVSpec:
    """Geometry of a KV pool: the same page id names one page in every layer. `dtype` is "f16" or
    "f32"."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    dtype: Literal["f16", "f32"] = "f16"

    @property
    def bytes_per_page(self) -> int:
        """Bytes of keys and values of one page over all layers."""
        width = 2 if self.dtype == "f16" else 4
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * PAGE_SIZE * width


@dataclass(frozen=True)
class Limits:
    """Largest step a compiled forward must take: sizes its buffers."""

    max_tokens: int
    max_seqs: int
    max_rows: int
    max_context: int


@dataclass(frozen=True)
class StepArrays:
    """One step's inputs as int32 arrays, made by the runner.

    **Shapes** token_ids [T]; positions [T]; cu_seqlens [S+1], rows of sequence s are
    cu_seqlens[s]:cu_seqlens[s+1];
    context_lens [S], tokens in the cache after this step (the last token of s is at position
    context_lens[s]-1);
    page_table [S, max_pages], -1 where unused; rows [R], which of the T rows need logits.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    page_table: NDArray[np.int32]
    rows: NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """What a model's forward sees: the same fields as `StepArrays`, as the backend's tensors, and
    the KV pool."""

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    step: Any  # backend-private: page table, cu_seqlens, context_lens
    kv: Any  # the backend's KV pool


@dataclass(frozen=True)
class AttentionSpec:
    """**Units** `scale` multiplies q.k; `window`: a query sees itself and window-1 keys before it
    (0 = all);
    `softcap` c > 0: scores become c*tanh(score/c)."""

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0


Forward = Callable[["Ops", Batch], Tensor]
CompiledForward = Callable[[StepArrays], "NDArray[np.float32]"]


class Ops(Protocol):
    """Compute ops at transformer grain, and the few calls that own memory."""

    name: str

    # ---- memory
    def weight(self, stored: StoredTensor) -> Weight:
        """A 2-D matrix `(out, in)` or 1-D vector in the backend's best layout; quantisation never
        shows afterwards."""

    def weight_rows(self, parts: tuple[StoredTensor, ...]) -> Weight:
        """Matrices stacked along the out axis (shards of one matrix); all have one kind and one
        in-size."""

    def kv_pool(self, spec: KVSpec) -> Any:
        """A zeroed paged pool."""

    def compile(self, forward: Forward, kv: Any, limits: Limits) -> CompiledForward:
        """Ready to run steps: takes `StepArrays`, returns logits [R, vocab] float32, valid until
        the next call."""

    # ---- compute (all activations are float32)
    def embedding(self, table: Weight, token_ids: Tensor) -> Tensor:
        """Rows of a (vocab, width) table -> [T, width]; decoded exactly."""

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
        """x [rows, in] -> x @ weight.T + bias [rows, out]."""

    def rms_norm(self, x: Tensor, weight: Weight | None, eps: float) -> Tensor:
        """Over the last axis: x / sqrt(mean(x^2) + eps) * weight (no weight: ones). Works on [T,
        heads, dim] too."""

    def rope(self, x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        """x [T, heads, head_dim] rotated by position."""

    def paged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """Write k, v of this step into the pool, then causal softmax attention of q over each
        sequence's pages.

        **Shapes** q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, num_heads
        * head_dim];
        query head h reads kv head h // (num_heads // num_kv_heads).
        """

    def glu(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, same shape."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, width], rows [R] -> [R, width]."""

    def reshape(self, x: Tensor, *tail: int) -> Tensor:
        """Keep the first axis, view the rest as `tail`: [T, H*D] -> reshape(x, H, D) -> [T, H,
        D]."""
