"""SmolLM2 and Gemma 3 from their real files against transformers in float32.

Two short prompts each, to stay within seconds; `check_goldens.py` compares all ten.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import digests
import pytest
import running

from headrace.backends.reference import ReferenceOps
from headrace.formats.checkpoint import open_checkpoint
from headrace.models import Model, load_model

OPS = ReferenceOps(batch_invariant=False)


@pytest.fixture(scope="module")
def smollm2(model_path: Callable[[str], Path]) -> Model:
    return load_model(open_checkpoint(model_path("smollm2:135m")), OPS)


@pytest.fixture(scope="module")
def gemma3(model_path: Callable[[str], Path]) -> Model:
    return load_model(open_checkpoint(model_path("gemma3:270m")), OPS)


@pytest.mark.parametrize("prompt", [0, 2])
def test_smollm2_agrees_with_transformers(smollm2: Model, prompt: int) -> None:
    digest = digests.load("smollm2:135m")[prompt]
    assert digests.real_error(smollm2, digest, OPS) < running.TOLERANCE


@pytest.mark.parametrize("prompt", [0, 2])
def test_gemma3_agrees_with_transformers(gemma3: Model, prompt: int) -> None:
    digest = digests.load("gemma3:270m")[prompt]
    assert digests.real_error(gemma3, digest, OPS) < running.TOLERANCE
