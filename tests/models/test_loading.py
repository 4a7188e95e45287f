"""What a checkpoint may not say: unknown names, keys and tensors, wrong shapes and sizes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.reference import ReferenceOps
from headrace.errors import FormatError, HeadraceError, InvalidRequest, UnsupportedModel
from headrace.models import FAMILIES, load_model, read_spec
from headrace.types import Checkpoint, StoredTensor


def gguf(case: str, **changes: Any) -> Checkpoint:
    """The GGUF form in memory; `changes` replace keys (dots written as __), None removes one."""
    metadata = tiny_models.gguf_metadata(case)
    arch = metadata["general.architecture"]
    for key, value in changes.items():
        name = f"{arch}.{key.replace('__', '.')}"
        if value is None:
            metadata.pop(name, None)
        else:
            metadata[name] = value
    return Checkpoint(case, "gguf", metadata, tiny_models.stored(tiny_models.gguf_tensors(case)))


def with_tensors(checkpoint: Checkpoint, **tensors: StoredTensor | None) -> Checkpoint:
    """Tensors added, or removed where None; dots written as __."""
    changed = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    merged = {**checkpoint.tensors, **changed}
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    return Checkpoint(checkpoint.path, checkpoint.dialect, checkpoint.metadata, kept)


def vector(name: str, size: int) -> StoredTensor:
    return StoredTensor(name, "F32", (size,), np.zeros(4 * size, np.uint8))


def test_unknown_architecture_lists_what_is_known() -> None:
    checkpoint = Checkpoint("x.gguf", "gguf", {"general.architecture": "mamba"}, {})
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*gemma2, gemma3, llama, phi3, qwen2"):
        load_model(checkpoint, ReferenceOps())
    known = {family.name for family in FAMILIES if family.dialect == "hf"}
    with pytest.raises(UnsupportedModel) as caught:
        load_model(tiny_models.hf_checkpoint("llama", model_type="mamba"), ReferenceOps())
    assert all(name in caught.value.message for name in known)


@pytest.mark.parametrize("name", [None, 7])
def test_architecture_must_be_named(name: Any) -> None:
    with pytest.raises(FormatError, match="model_type"):
        load_model(tiny_models.hf_checkpoint("llama", model_type=name), ReferenceOps())


HF_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"some_new_flag": 3}, "some_new_flag = 3"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantised safetensors"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "depend on the length"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
    ("qwen2", {"rope_scaling": {"rope_type": "default", "type": "mrope"}}, "type 'mrope'"),
    ("llama_yarn", {"rope_parameters": {"rope_theta": 1e4}}, "contradicts"),
    ("llama_yarn", {"rope_scaling": {**tiny_models.YARN, "mscale": 0.7}}, "mscale"),
    ("llama_yarn", {"rope_scaling": {**tiny_models.YARN, "truncate": False}}, "truncate"),
    ("qwen2", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("phi3", {"hidden_act": "gelu_new"}, "hidden_act"),
    ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma3", {"model_type": "gemma3"}, "vision"),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 2, 1]}, "entry 2"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "overrides", "message"), HF_REFUSALS)
def test_config_that_computes_something_else_is_refused(
    case: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(tiny_models.hf_checkpoint(case, **overrides))


HF_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_size": None}, "hidden_size is missing"),
    ("llama", {"hidden_size": "64"}, "must be an integer"),
    ("llama", {"hidden_size": 64.0}, "must be an integer"),
    ("llama", {"hidden_size": True}, "must be an integer"),
    ("llama", {"num_hidden_layers": 10**9}, "from 1 to"),
    ("llama", {"num_hidden_layers": 0}, "from 1 to"),
    ("llama", {"num_key_value_heads": 3}, "do not divide"),
    ("llama", {"num_key_value_heads": 8}, "from 1 to 4"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": "1e-5"}, "must be a number"),
    ("llama", {"rope_theta": -1.0}, "rope_theta"),
    ("llama", {"rope_scaling": [1]}, "must be a table"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ("llama", {"tie_word_embeddings": 1}, "true or false"),
    ("mistral", {"head_dim": 25}, "even"),
    ("phi3_long", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
    ("phi3_long", {"partial_rotary_factor": 1.0}, "list of 8 numbers"),
    ("qwen2", {"layer_types": ["full_attention"]}, "list of 3"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is missing"),
]


@pytest.mark.parametrize(("case", "overrides", "message"), HF_FAULTS)
def test_malformed_config_is_a_format_error(
    case: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        read_spec(tiny_models.hf_checkpoint(case, **overrides))


# Keys that published config.json files of each family carry beyond those of the tiny cases.
PUBLISHED_EXTRAS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"pretraining_tp": 1, "mlp_bias": False, "head_dim": 16, "rope_scaling": None}),
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),
    ("llama", {"_name_or_path": "x", "transformers_version": "4.42.3", "unsloth_fixed": True}),
    ("mistral", {"attention_dropout": 0.0, "eos_token_id": [2, 7], "initializer_range": 0.02}),
    ("smollm3", {"max_window_layers": 28, "pretraining_tp": 2, "mlp_bias": False}),
    ("qwen2", {"rope_scaling": None, "use_mrope": False}),
    ("phi3", {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "auto_map": {"AutoConfig": "x.Y"}}),
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
    ("gemma2", {"cache_implementation": "hybrid", "attention_bias": False}),
    ("gemma3", {"cache_implementation": "hybrid", "_sliding_window_pattern": 6}),
    ("gemma3", {"generation_config": {}, "use_bidirectional_attention": False}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "extras"), PUBLISHED_EXTRAS)
def test_harmless_keys_change_nothing(case: str, extras: dict[str, Any]) -> None:
    plain = read_spec(tiny_models.hf_checkpoint(case))
    assert read_spec(tiny_models.hf_checkpoint(case, **extras)) == plain


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_any_config_value_reads_or_ends_in_a_typed_error(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(sorted(tiny_models.CASES)))
    table = data.draw(st.sampled_from(["", "rope_scaling"]))
    config = dict(tiny_models.CASES[case])
    inner = dict(config.get("rope_scaling") or {}) if table else config
    keys = [*inner, "rope_parameters", "layer_types", "factor", "rope_type", "head_dim"]
    inner[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    if table:
        config["rope_scaling"] = inner
    tensors = tiny_models.hf_checkpoint(case).tensors
    with contextlib.suppress(HeadraceError):
        load_model(Checkpoint(case, "hf", config, tensors), ReferenceOps())


ARRAYS = st.sampled_from([np.array([]), np.array([2, 2, 2]), np.array([1.5]), np.array([True])])


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_any_gguf_value_reads_or_ends_in_a_typed_error(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(tiny_models.GGUF_CASES))
    metadata = tiny_models.gguf_metadata(case)
    arch = metadata["general.architecture"]
    extra = ("rope.scaling.type", "rope.scaling.factor", "expert_count", "attention.causal",
             "attention.sliding_window_pattern", "rope.freq_base_swa")  # fmt: skip
    keys = [*metadata, *(f"{arch}.{key}" for key in extra)]
    metadata[data.draw(st.sampled_from(keys))] = data.draw(JSON | ARRAYS)
    tensors = tiny_models.stored(tiny_models.gguf_tensors(case))
    with contextlib.suppress(HeadraceError):
        load_model(Checkpoint(case, "gguf", metadata, tensors), ReferenceOps())


GGUF_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"expert_count": 8}, "expert_count is 8"),
    ("llama", {"attention__temperature_scale": 0.1}, "temperature_scale"),
    ("llama", {"logit_scale": 0.5}, "logit_scale"),
    ("llama", {"attention__value_length": 32}, "value_length"),
    ("llama", {"attention__head_count_kv": np.array([2, 2, 1])}, "differs between layers"),
    ("llama", {"rope__scaling__type": "dynamic"}, "dynamic"),
    ("llama", {"rope__scaling__type": "longrope"}, "rope_factors_short is missing"),
    ("qwen3", {"pooling_type": 3}, "pooling_type"),
    ("qwen2", {"attention__causal": False}, "causal"),
]


@pytest.mark.parametrize(("case", "changes", "message"), GGUF_REFUSALS)
def test_gguf_that_computes_something_else_is_refused(
    case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(gguf(case, **changes))


GGUF_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"block_count": None}, "block_count is missing"),
    ("llama", {"block_count": 2**31}, "from 1 to"),
    ("llama", {"embedding_length": 32}, r"must be \(vocab, 32\)"),
    ("llama", {"rope__dimension_count": 15}, "even"),
    ("llama", {"rope__dimension_count": 18}, "from 2 to 16"),
    ("llama", {"context_length": 0}, "from 1 to"),
    ("llama3", {"rope__dimension_count": 8}, r"rope_freqs.weight has shape \(8,\)"),
]


@pytest.mark.parametrize(("case", "changes", "message"), GGUF_FAULTS)
def test_malformed_gguf_keys_are_format_errors(
    case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        read_spec(gguf(case, **changes))


def test_equal_head_counts_per_layer_count_as_one() -> None:
    counts = np.array([2, 2, 2], np.int32)
    assert read_spec(gguf("llama", attention__head_count_kv=counts)).num_kv_heads == 2


def test_gemma3_accepts_its_pattern_as_flags() -> None:
    flags = np.array([True, False, True, True, False, True, True])
    spec = read_spec(gguf("gemma3", attention__sliding_window_pattern=flags))
    assert [layer.window > 0 for layer in spec.layers] == flags.tolist()


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_rope_factors_must_be_positive_and_finite(value: float) -> None:
    factors = np.full(8, value, np.float32)
    tensor = StoredTensor("rope_freqs.weight", "F32", (8,), factors.view(np.uint8))
    checkpoint = with_tensors(gguf("llama3"), rope_freqs__weight=tensor)
    with pytest.raises(FormatError, match="above 0"):
        read_spec(checkpoint)


def test_missing_tensor_is_named() -> None:
    checkpoint = with_tensors(gguf("llama"), blk__1__ffn_gate__weight=None)
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_gate\.weight is missing"):
        load_model(checkpoint, ReferenceOps())


def test_wrong_shape_says_both() -> None:
    wrong = vector("blk.0.attn_norm.weight", 63)
    checkpoint = with_tensors(gguf("llama"), blk__0__attn_norm__weight=wrong)
    with pytest.raises(FormatError, match=r"\(63,\); the configuration says \(64,\)"):
        load_model(checkpoint, ReferenceOps())


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("llama", "blk.0.attn_q.bias"),
        ("llama", "blk.3.attn_q.weight"),
        ("qwen2", "blk.0.attn_q_norm.weight"),
        ("llama", "blk.0.ffn_gate_inp.weight"),
    ],
)
def test_a_tensor_nobody_asks_for_is_refused(case: str, name: str) -> None:
    extra = {name.replace(".", "__"): vector(name, 64)}
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        load_model(with_tensors(gguf(case), **extra), ReferenceOps())


def test_rope_factors_that_are_not_applied_are_refused() -> None:
    factors = StoredTensor(
        "rope_factors_long.weight", "F32", (8,), np.ones(8, "<f4").view(np.uint8)
    )
    checkpoint = with_tensors(
        gguf("llama", rope__scaling__type="linear"), rope_factors_long__weight=factors
    )
    with pytest.raises(HeadraceError, match="rope_factors_long"):
        load_model(checkpoint, ReferenceOps())


def test_rotary_buffers_are_harmless() -> None:
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    extra = {name.replace(".", "__"): vector(name, 8) for name in names}
    load_model(with_tensors(tiny_models.hf_checkpoint("llama"), **extra), ReferenceOps())


def test_untied_model_without_head_is_refused() -> None:
    checkpoint = with_tensors(tiny_models.hf_checkpoint("llama"), lm_head__weight=None)
    with pytest.raises(FormatError, match="lm_head"):
        load_model(checkpoint, ReferenceOps())


def test_head_is_the_embedding_when_nothing_says_otherwise() -> None:
    metadata = {k: v for k, v in tiny_models.LLAMA.items() if k != "tie_word_embeddings"}
    tensors = dict(tiny_models.hf_checkpoint("llama").tensors)
    assert not read_spec(Checkpoint("x", "hf", metadata, tensors)).is_tied
    del tensors["lm_head.weight"]
    assert read_spec(Checkpoint("x", "hf", metadata, tensors)).is_tied


@pytest.mark.parametrize("max_context", [0, -1, 129])
def test_max_context_has_bounds(max_context: int) -> None:
    with pytest.raises(InvalidRequest, match="this model takes 1 to 128"):
        load_model(tiny_models.hf_checkpoint("llama"), ReferenceOps(), max_context=max_context)


def test_large_matrices_stay_views_of_the_file() -> None:
    seen: list[StoredTensor] = []

    class Spy(ReferenceOps):
        def weight(self, stored: StoredTensor) -> Any:
            seen.append(stored)
            return super().weight(stored)

    checkpoint = tiny_models.hf_checkpoint("phi3")
    load_model(checkpoint, Spy())
    files = [tensor.data for tensor in checkpoint.tensors.values()]
    for tensor in seen:
        assert any(np.shares_memory(tensor.data, data) for data in files), tensor.name
