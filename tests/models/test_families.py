"""Every family against transformers in float32, in both dialects, and refusals by both readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import digests
import numpy as np
import pytest
import running
import tiny_models

from headrace.backends.ops import AttentionSpec, Rope
from headrace.backends.reference import ReferenceOps
from headrace.formats.checkpoint import open_checkpoint
from headrace.models import load_model, read_spec
from headrace.types import Checkpoint

CASES = sorted(tiny_models.CASES)


@pytest.fixture(scope="module")
def saved_configs() -> dict[str, Any]:
    """config.json of each case as transformers 5 saves it."""
    text = (digests.GOLDENS / "saved_configs.json").read_text(encoding="utf-8")
    configs: dict[str, Any] = json.loads(text)
    return configs


@pytest.mark.parametrize("case", CASES)
def test_hugging_face_form_agrees_with_transformers(case: str) -> None:
    error = digests.tiny_error(tiny_models.hf_checkpoint(case), case)
    assert error < running.TOLERANCE


@pytest.mark.parametrize("case", sorted(tiny_models.GGUF_CASES))
def test_gguf_form_agrees_with_transformers(case: str, tmp_path: Path) -> None:
    tiny_models.write_gguf_form(case, tmp_path / "tiny.gguf")
    error = digests.tiny_error(open_checkpoint(tmp_path / "tiny.gguf"), case)
    assert error < running.TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_configs_saved_by_transformers_5_read_the_same(
    case: str, saved_configs: dict[str, Any]
) -> None:
    published = tiny_models.hf_checkpoint(case)
    saved = Checkpoint(case, "hf", saved_configs[case], published.tensors)
    context = tiny_models.MAX_CONTEXT.get(case)
    assert read_spec(saved, max_context=context) == read_spec(published, max_context=context)


def test_longrope_is_chosen_by_max_context_not_by_the_prompt() -> None:
    checkpoint = tiny_models.hf_checkpoint("phi3_long")
    short = read_spec(checkpoint, max_context=24).layers[0].rope
    long = read_spec(checkpoint, max_context=25).layers[0].rope
    whole = read_spec(checkpoint).layers[0].rope
    assert short is not None
    assert long is not None
    assert long == whole
    ratio = np.array(short.inv_freq) / np.array(long.inv_freq)
    scaling = tiny_models.PHI3_LONG["rope_scaling"]
    expected = np.array(scaling["long_factor"]) / np.array(scaling["short_factor"])
    np.testing.assert_allclose(ratio, expected, rtol=1e-12)


def test_a_window_no_sequence_outgrows_is_dropped() -> None:
    checkpoint = tiny_models.hf_checkpoint("mistral", sliding_window=64)
    assert read_spec(checkpoint).layers[0].window == 64
    assert read_spec(checkpoint, max_context=64).layers[0].window == 0


def test_weight_bytes_count_each_tensor_once() -> None:
    checkpoint = tiny_models.hf_checkpoint("llama_tied")
    expected = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
    assert load_model(checkpoint, ReferenceOps()).weight_bytes == expected


def test_a_duplicate_head_of_a_tied_model_changes_nothing() -> None:
    checkpoint = tiny_models.hf_checkpoint("llama_tied")
    table = checkpoint.tensors["model.embed_tokens.weight"]
    tensors = {**checkpoint.tensors, "lm_head.weight": table}
    again = Checkpoint("twice", "hf", checkpoint.metadata, tensors)
    assert digests.tiny_error(again, "llama_tied") < running.TOLERANCE


def test_kv_spec_follows_the_model() -> None:
    spec = load_model(tiny_models.hf_checkpoint("mistral"), ReferenceOps()).kv_spec(5, "f16")
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.num_pages) == (3, 2, 24, 5)


class CountingOps(ReferenceOps):
    """Counts rows given to the head and remembers how layers attended."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: list[AttentionSpec] = []
        self.ropes: list[Rope] = []
        self.rows_of_last_linear = 0

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        self.rows_of_last_linear = len(x)
        return super().linear(x, weight, bias)

    def rope(self, x: Any, positions: Any, rope: Rope) -> Any:
        self.ropes.append(rope)
        return super().rope(x, positions, rope)

    def paged_attention(self, q: Any, k: Any, v: Any, batch: Any, spec: AttentionSpec) -> Any:
        self.specs.append(spec)
        return super().paged_attention(q, k, v, batch, spec)


def test_the_head_only_sees_the_rows_asked_for() -> None:
    ops = CountingOps()
    model = load_model(tiny_models.hf_checkpoint("llama"), ops)
    tokens = tiny_models.prompts("llama")[0]
    wanted = running.logits_of(model, tokens, [3, 39], ops)
    assert ops.rows_of_last_linear == 2
    everything = running.logits_of(model, tokens, None, ops)
    assert np.array_equal(wanted, everything[[3, 39]])


def test_gemma3_has_one_full_layer_in_six() -> None:
    ops = CountingOps()
    model = load_model(tiny_models.hf_checkpoint("gemma3"), ops)
    running.logits_of(model, tiny_models.prompts("gemma3")[1], None, ops)
    assert [spec.window for spec in ops.specs] == [8, 8, 8, 8, 8, 0, 8]
    assert [spec.layer for spec in ops.specs] == list(range(7))


def test_smollm3_leaves_every_fourth_layer_without_rope() -> None:
    ops = CountingOps()
    model = load_model(tiny_models.hf_checkpoint("smollm3"), ops)
    running.logits_of(model, tiny_models.prompts("smollm3")[1], None, ops)
    assert len(ops.ropes) == 2 * 4  # q and k of four layers out of five
