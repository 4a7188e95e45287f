"""What tests share: where the real models are.

Real models are never downloaded by a test; `.ci/run` pulls them first (`headrace pull NAME`). Where
one is missing the test is skipped with the command that fetches it, or fails when
HEADRACE_REQUIRE_MODELS=1 says that everything must run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import store_config
from headrace.formats.store import installed_ids, resolve


def find_model(name: str) -> Path:
    """The file of a pulled catalogue model; skips or fails the test that asks when it is absent."""
    config = store_config()
    if name in installed_ids(config):
        return resolve(name, config).path
    reason = f"{name} is not in the store {config.root}; run: headrace pull {name}"
    if os.environ.get("HEADRACE_REQUIRE_MODELS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """`model_path("smollm2:135m")` is the path of that model's GGUF file."""
    return find_model
