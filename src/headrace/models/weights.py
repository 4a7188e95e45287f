"""From checkpoint tensors to backend weights: names of both dialects, shapes, nothing left over.

A family asks for weights by canonical name (a key of its `Names` table); the table knows what each
dialect calls it. Every shape is compared with the spec, and a tensor nobody asked for is an error:
it would mean that the file computes something else than the family does. Matrices stay views of
the file; only small vectors are ever copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ops import Ops, Weight
from headrace.errors import FormatError, UnsupportedModel
from headrace.formats import blocks
from headrace.types import Checkpoint, StoredTensor


@dataclass(frozen=True)
class Names:
    """What the two dialects call one weight; `{i}` stands for the layer.

    `hf_offset` is added to a vector of the Hugging Face dialect (Gemma stores weight - 1 there).
    """

    gguf: str
    hf: str
    hf_offset: float = 0.0


COMMON: Mapping[str, Names] = {
    "embedding": Names("token_embd.weight", "model.embed_tokens.weight"),
    "norm": Names("output_norm.weight", "model.norm.weight"),
    "head": Names("output.weight", "lm_head.weight"),
    "attn_norm": Names("blk.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    "q": Names("blk.{i}.attn_q.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    "k": Names("blk.{i}.attn_k.weight", "model.layers.{i}.self_attn.k_proj.weight"),
    "v": Names("blk.{i}.attn_v.weight", "model.layers.{i}.self_attn.v_proj.weight"),
    "o": Names("blk.{i}.attn_output.weight", "model.layers.{i}.self_attn.o_proj.weight"),
    "ffn_norm": Names(
        "blk.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"
    ),
    "gate": Names("blk.{i}.ffn_gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
    "up": Names("blk.{i}.ffn_up.weight", "model.layers.{i}.mlp.up_proj.weight"),
    "down": Names("blk.{i}.ffn_down.weight", "model.layers.{i}.mlp.down_proj.weight"),
}

QK_NORM: Mapping[str, Names] = {
    "q_norm": Names("blk.{i}.attn_q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    "k_norm": Names("blk.{i}.attn_k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
}

# Buffers some exporters write: both are recomputed from the configuration.
HARMLESS = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|\w+_cached)$")


class Weights:
    """Tensors of one checkpoint by canonical name; mutates only its record of what was taken.

    **Raises** `FormatError` for a missing tensor or a wrong shape.
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, Names], ops: Ops) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._ops = ops
        self._taken: set[str] = set()
        self.num_bytes = 0

    @property
    def dialect(self) -> str:
        """The checkpoint's dialect."""
        return self._checkpoint.dialect

    def name(self, key: str, layer: int = 0) -> str:
        """The checkpoint's name of a weight."""
        pattern = self._names[key]
        return (pattern.gguf if self.dialect == "gguf" else pattern.hf).replace("{i}", str(layer))

    def has(self, key: str, layer: int = 0) -> bool:
        """Whether the checkpoint has a weight."""
        return self.name(key, layer) in self._checkpoint.tensors

    def stored(self, key: str, shape: tuple[int, ...], layer: int = 0) -> StoredTensor:
        """The tensor as it lies in the file; counts as taken."""
        tensor = take(self._checkpoint, self.name(key, layer), shape)
        if tensor.name not in self._taken:
            self.num_bytes += tensor.data.nbytes
        self._taken.add(tensor.name)
        return tensor

    def ignore(self, key: str) -> None:
        """A tensor that may be there and is not needed."""
        self._taken.add(self.name(key))

    def matrix(self, key: str, shape: tuple[int, int], layer: int = 0) -> Weight:
        """A weight (out, in)."""
        return self._ops.weight(self.stored(key, shape, layer))

    def rows(self, key: str, in_size: int, layer: int, sizes: tuple[int, ...]) -> list[Weight]:
        """A stored matrix cut into weights of `sizes` rows each; rows are whole blocks."""
        tensor = self.stored(key, (sum(sizes), in_size), layer)
        by_row = tensor.data.reshape(sum(sizes), -1)
        parts, start = [], 0
        for size in sizes:
            name = f"{tensor.name}[{start}:{start + size}]"
            data = by_row[start : start + size].reshape(-1)
            parts.append(StoredTensor(name, tensor.kind, (size, in_size), data))
            start += size
        return [self._ops.weight(part) for part in parts]

    def vector(self, key: str, size: int, layer: int = 0) -> Weight:
        """A weight [size], with its dialect's offset (then a copy)."""
        tensor = self.stored(key, (size,), layer)
        offset = self._names[key].hf_offset if self.dialect == "hf" else 0.0
        if offset:
            values = blocks.decode(tensor.kind, tensor.data, tensor.shape) + np.float32(offset)
            tensor = StoredTensor(tensor.name, "F32", tensor.shape, values.view(np.uint8))
        return self._ops.weight(tensor)

    def finish(self, also_taken: set[str]) -> None:
        """Refuse tensors nobody took. `also_taken`: tensors the spec reader used."""
        left = set(self._checkpoint.tensors) - self._taken - also_taken
        unknown = sorted(name for name in left if not HARMLESS.match(name))
        if unknown:
            raise UnsupportedModel(
                f"{self._checkpoint.path}: {len(unknown)} tensor(s) this architecture does not "
                f"have: {', '.join(unknown[:8])}; the model is refused, it computes something else"
            )


def take(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor whose shape must be `shape`. **Raises** `FormatError`."""
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise FormatError(f"{checkpoint.path}: tensor {name} is missing")
    if tensor.shape != shape:
        raise FormatError(
            f"{checkpoint.path}: tensor {name} has shape {tensor.shape}; "
            f"the configuration says {shape}"
        )
    return tensor


def decode_vector(checkpoint: Checkpoint, name: str, size: int) -> NDArray[np.float64]:
    """The values of a small tensor [size]. **Raises** `FormatError` unless finite and above 0."""
    tensor = take(checkpoint, name, (size,))
    values = blocks.decode(tensor.kind, tensor.data, tensor.shape).astype(np.float64)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise FormatError(f"{checkpoint.path}: {name} must hold finite numbers above 0")
    return values
