"""Fixtures of the command-line tests: a model file, a world around a fake engine, a keyboard."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import FakeService, FakeWorld, fixed


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The path of a file that stands for a model."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def world(tmp_path: Path) -> FakeWorld:
    return FakeWorld(tmp_path / "store", FakeService(fixed("It is ", "Rayleigh.")))


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts text into standard input."""

    def put(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    return put
