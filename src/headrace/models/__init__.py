"""Model families, each written once over `backends.ops`, and the way from a checkpoint to a model.

`load_model` picks the family by the architecture the checkpoint names, reads its spec (refusing
keys it does not know), takes its tensors (refusing ones it does not know) and returns a `Decoder`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.backends.ops import Ops
from headrace.errors import FormatError, UnsupportedModel
from headrace.models import gemma, llama, phi, qwen
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.family import ROPE_TENSORS, Family, Source
from headrace.models.keys import Keys
from headrace.models.spec import DecoderSpec
from headrace.models.weights import Weights
from headrace.types import Checkpoint

Model = Decoder

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *qwen.FAMILIES,
    *phi.FAMILIES,
    *gemma.FAMILIES,
)

__all__ = ["FAMILIES", "Decoder", "DecoderSpec", "Model", "load_model", "read_spec"]


def load_model(checkpoint: Checkpoint, ops: Ops, *, max_context: int | None = None) -> Model:
    """Read, check and load a model onto a backend.

    `max_context` is the longest sequence it will be given (None: what the file states); longrope
    picks its factors by it, once. The backend may keep views of the checkpoint's memory.

    **Raises** `UnsupportedModel` for an unknown architecture, key or tensor; `FormatError` for a
    missing or ill-formed one; `InvalidRequest` when `max_context` exceeds the file's.
    """
    family = _family(checkpoint)
    spec = read_spec(checkpoint, max_context=max_context)
    context = max_context or spec.context_length
    weights = Weights(checkpoint, family.names, ops)
    model = load_decoder(family.name, spec, weights, family.block, context)
    weights.finish({f"{name}.weight" for name in ROPE_TENSORS})
    return model


def read_spec(checkpoint: Checkpoint, *, max_context: int | None = None) -> DecoderSpec:
    """The spec alone, without loading weights; same errors as `load_model`."""
    family = _family(checkpoint)
    prefix = f"{family.name}." if checkpoint.dialect == "gguf" else ""
    keys = Keys(checkpoint.metadata, prefix, checkpoint.path)
    spec = family.read(Source(checkpoint, keys, max_context))
    assert len(spec.layers) == spec.num_layers, "a reader must fill in every layer"
    context = max_context or spec.context_length
    # A window no sequence can outgrow hides nothing.
    layers = tuple(
        replace(layer, window=0) if layer.window >= context else layer for layer in spec.layers
    )
    return replace(spec, layers=layers)


def _family(checkpoint: Checkpoint) -> Family:
    key = "general.architecture" if checkpoint.dialect == "gguf" else "model_type"
    name: Any = checkpoint.metadata.get(key)
    if not isinstance(name, str):
        raise FormatError(f"{checkpoint.path}: {key} is missing or not a string")
    known = {f.name: f for f in FAMILIES if f.dialect == checkpoint.dialect}
    if name not in known:
        raise UnsupportedModel(
            f"{checkpoint.path}: architecture {name!r} is not supported; known: "
            f"{', '.join(sorted(known))}"
        )
    return known[name]
