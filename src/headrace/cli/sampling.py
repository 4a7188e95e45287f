"""Which sampling values hold when the command line names none.

First what was given, then what the model's own file recommends, then the catalogue, then
`FALLBACK`. The result is printed with --verbose, so a default is never a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.formats.catalogue import find
from headrace.types import SamplingParams

FALLBACK: dict[str, Any] = {"temperature": 0.7}  # between flat (1.0) and repetitive (0)

# Keys of the GGUF metadata (llama.cpp, general.sampling.*) and of generation_config.json.
_GGUF_KEYS = (
    ("general.sampling.temp", "temperature"),
    ("general.sampling.top_k", "top_k"),
    ("general.sampling.top_p", "top_p"),
    ("general.sampling.min_p", "min_p"),
    ("general.sampling.penalty_repeat", "repetition_penalty"),
)
_HF_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def choose_params(
    given: Mapping[str, Any], model_id: str, metadata: Mapping[str, Any]
) -> SamplingParams:
    """**Raises** `InvalidRequest` for a value out of range, wherever it came from."""
    entry = find(model_id)
    advised = file_defaults(metadata) or dict(entry.sampling if entry else ())
    return SamplingParams(**{**FALLBACK, **advised, **given})


def file_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the model file itself recommends; empty when it says nothing."""
    found = {name: metadata[key] for key, name in _GGUF_KEYS if key in metadata}
    config = metadata.get("generation_config")
    if isinstance(config, Mapping):
        found |= {key: config[key] for key in _HF_KEYS if config.get(key) is not None}
        if config.get("do_sample") is False:
            found["temperature"] = 0.0
    return found


def describe(params: SamplingParams) -> str:
    """The parameters that differ from neutral, and the temperature."""
    neutral = SamplingParams()
    shown = [f"temperature {params.temperature:g}"]
    for name in SamplingParams.__dataclass_fields__:
        value = getattr(params, name)
        if name != "temperature" and value != getattr(neutral, name):
            shown.append(f"{name} {value}")
    return ", ".join(shown)
