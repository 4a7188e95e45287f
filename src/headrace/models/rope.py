"""Rotary frequencies: from a base and a scaling rule to one list of inverse frequencies.

All scaling is done here, once, in float64; an op only multiplies by the position. Rules that look
at the length of the running text ("dynamic" NTK) are refused: a token's answer would change with
what comes after it. For the same reason longrope's short or long factors are chosen once, by the
context the model is loaded for, and not by the length of each prompt.
Source: RoPE (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1 model card;
key names as in Hugging Face transformers 5 and in GGUF's specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ops import Rope
from headrace.errors import UnsupportedModel
from headrace.models.keys import Keys

Frequencies = NDArray[np.float64]
MIN_THETA = 1.5  # published ones start at 10,000; YaRN divides by its logarithm
MAX_THETA = 1e12
MAX_FACTOR = 1e6
MAX_CONTEXT = 2**27


@dataclass(frozen=True)
class RopeInputs:
    """What a scaling rule may look at.

    `rotary_dim`: elements of a head that turn. `max_context`: what the model is loaded for;
    `trained_context`: what its file states; `original_context`: the one before stretching, where
    the file keeps it apart from the rope table.
    """

    rotary_dim: int
    max_context: int
    trained_context: int
    interleaved: bool = False
    original_context: int | None = None


# ---- rules


def plain(theta: float, rotary_dim: int) -> Frequencies:
    """theta^(-2i / rotary_dim), i < rotary_dim / 2."""
    return theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def llama3(freq: Frequencies, factor: float, bands: tuple[float, float, int]) -> Frequencies:
    """Divide long wavelengths by `factor`, keep short ones, blend between.

    `bands`: low_freq_factor, high_freq_factor, original context.
    """
    low, high, original = bands
    turns = original * freq / (2 * math.pi)  # rotations over the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * freq / factor + smooth * freq


def yarn(
    freq: Frequencies, theta: float, factor: float, bands: tuple[float, float, int]
) -> Frequencies:
    """Interpolate slow dimensions, keep fast ones, ramp between.

    `bands`: beta_fast, beta_slow (rotations over the original context), original context.
    """
    beta_fast, beta_slow, original = bands
    dim = 2 * len(freq)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(beta_fast)), 0)
    high = min(math.ceil(dimension(beta_slow)), dim - 1)
    ramp = np.clip((np.arange(len(freq)) - low) / max(high - low, 0.001), 0.0, 1.0)
    return freq / factor * ramp + freq * (1 - ramp)


def yarn_attention_factor(factor: float) -> float:
    """YaRN's temperature, as a multiplier of cos and sin."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """LongRoPE's temperature, as a multiplier of cos and sin."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _rope(freq: Frequencies, inputs: RopeInputs, attention_factor: float = 1.0) -> Rope:
    return Rope(tuple(freq.tolist()), inputs.interleaved, attention_factor)


# ---- config.json


def hf_rope_table(keys: Keys, default_theta: float) -> tuple[Keys, float]:
    """The rope table and its theta, from `rope_parameters` (transformers 5) or from `rope_theta`
    and `rope_scaling` (before)."""
    params, scaling = keys.table("rope_parameters"), keys.table("rope_scaling")
    if params is not None and scaling is not None:
        raise UnsupportedModel(f"{keys.name('rope_scaling')} contradicts rope_parameters")
    theta = keys.number("rope_theta", MIN_THETA, MAX_THETA, default_theta)
    if params is not None:
        theta = params.number("rope_theta", MIN_THETA, MAX_THETA, theta)
    return params or scaling or Keys({}, "", keys.name("rope")), theta


def hf_whole_rope(keys: Keys, default_theta: float, inputs: RopeInputs) -> Rope:
    """The rope of a config.json whose layers are all alike and whose heads turn completely."""
    table, theta = hf_rope_table(keys, default_theta)
    table.expect("partial_rotary_factor", 1.0)
    keys.expect("partial_rotary_factor", 1.0)
    return hf_rope(table, theta, inputs)


def hf_rope(params: Keys, theta: float, inputs: RopeInputs) -> Rope:
    """Read a `rope_scaling` or `rope_parameters` table (its `rope_theta` already read)."""
    old_name, kind = params.raw("type"), params.raw("rope_type")
    kind = kind or old_name or "default"
    rules = {
        "default": _hf_default,
        "linear": _hf_linear,
        "llama3": _hf_llama3,
        "yarn": _hf_yarn,
        "longrope": _hf_longrope,
        "su": _hf_longrope,
    }
    if not isinstance(kind, str) or kind not in rules or old_name not in (None, kind):
        raise UnsupportedModel(
            f"{params.name('rope_type')} is {kind!r} (type {old_name!r}); known: "
            f"{', '.join(rules)} (rules that depend on the length of the text are refused: "
            "answers would change)"
        )
    rope = rules[kind](params, theta, inputs)
    params.finish()
    return rope


def _factor(params: Keys) -> float:
    return params.number("factor", 1.0, MAX_FACTOR)


def _original(params: Keys, default: int | None = None) -> int:
    return params.integer("original_max_position_embeddings", 2, MAX_CONTEXT, default)


def _hf_default(params: Keys, theta: float, inputs: RopeInputs) -> Rope:
    return _rope(plain(theta, inputs.rotary_dim), inputs)


def _hf_linear(params: Keys, theta: float, inputs: RopeInputs) -> Rope:
    return _rope(plain(theta, inputs.rotary_dim) / _factor(params), inputs)


def _hf_llama3(params: Keys, theta: float, inputs: RopeInputs) -> Rope:
    low = params.number("low_freq_factor", 1e-3, 1e3)
    high = params.number("high_freq_factor", 1e-3, 1e3)
    if low >= high:
        raise UnsupportedModel(f"{params.name('low_freq_factor')} must be below high_freq_factor")
    freq = plain(theta, inputs.rotary_dim)
    return _rope(llama3(freq, _factor(params), (low, high, _original(params))), inputs)


def _hf_yarn(params: Keys, theta: float, inputs: RopeInputs) -> Rope:
    factor = _factor(params)
    bands = (
        params.number("beta_fast", 1e-3, 1e4, 32.0),
        params.number("beta_slow", 1e-3, 1e4, 1.0),
        _original(params, inputs.trained_context),
    )
    params.expect("truncate", True)
    temperature = params.number("attention_factor", 1e-3, 1e3, yarn_attention_factor(factor))
    freq = yarn(plain(theta, inputs.rotary_dim), theta, factor, bands)
    return _rope(freq, inputs, temperature)


def _hf_longrope(params: Keys, theta: float, inputs: RopeInputs) -> Rope:
    half = inputs.rotary_dim // 2
    short, long = params.numbers("short_factor", half), params.numbers("long_factor", half)
    original = inputs.original_context or _original(params)
    params.expect("original_max_position_embeddings", original)
    factor = params.number("factor", 1e-3, MAX_FACTOR, max(inputs.trained_context / original, 1e-3))
    temperature = params.number(
        "attention_factor", 1e-3, 1e3, longrope_attention_factor(factor, original)
    )
    chosen = np.asarray(long if inputs.max_context > original else short)
    return _rope(plain(theta, inputs.rotary_dim) / chosen, inputs, temperature)


# ---- GGUF


def gguf_rope(keys: Keys, factors: dict[str, Frequencies], inputs: RopeInputs) -> Rope:
    """Read `rope.*`. `factors`: the tensors the file has of rope_freqs, rope_factors_long and
    rope_factors_short, each [rotary_dim / 2]; frequencies are divided by them."""
    theta = keys.number("rope.freq_base", MIN_THETA, MAX_THETA, 10000.0)
    has_longrope = "rope_factors_long" in factors or "rope_factors_short" in factors
    default_kind = "longrope" if has_longrope else "linear"
    kind = keys.expect("rope.scaling.type", "none", "linear", "yarn", "longrope") or default_kind
    if has_longrope and kind != "longrope":
        raise UnsupportedModel(
            f"{keys.name('rope.scaling.type')} is {kind!r}, but the file has rope_factors_long "
            "or rope_factors_short, which only longrope uses"
        )
    factor = keys.number(
        "rope.scaling.factor",
        1e-3,
        MAX_FACTOR,
        keys.number("rope.scale_linear", 1e-3, MAX_FACTOR, 1.0),
    )
    original = keys.integer(
        "rope.scaling.original_context_length", 1, MAX_CONTEXT, inputs.trained_context
    )
    temperature = keys.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)
    freq = plain(theta, inputs.rotary_dim)
    if "rope_freqs" in factors:
        freq = freq / factors["rope_freqs"]
    if kind == "linear":
        freq = freq / factor
    if kind == "yarn":
        beta_fast = keys.number("rope.scaling.yarn_beta_fast", 1e-3, 1e4, 32.0)
        beta_slow = keys.number("rope.scaling.yarn_beta_slow", 1e-3, 1e4, 1.0)
        freq = yarn(freq, theta, factor, (beta_fast, beta_slow, original))
        temperature *= yarn_attention_factor(factor)
    if kind == "longrope":
        which = "rope_factors_long" if inputs.max_context > original else "rope_factors_short"
        if which not in factors:
            raise UnsupportedModel(f"{keys.name('rope.scaling.type')}: tensor {which} is missing")
        freq = freq / factors[which]
    return _rope(freq, inputs, temperature)
