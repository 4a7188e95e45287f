"""The small model as a file, written once."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_model import write_small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_small_model(path)
    return path
