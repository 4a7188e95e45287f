"""The README's first command and `show`, on the real default model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.app import run_app

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _needs_the_default_model(model_path: Callable[[str], Path]) -> None:
    model_path("smollm2:135m")


def test_the_first_command_answers(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        args = ["run", "Why is the sky blue?", "--temperature", "0", "--max-tokens", "24"]
        assert run_app([*args, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "sky" in out
    assert "blue" in out
    assert err == ""


def test_show_tells_the_models_own_numbers(capsys: Captured) -> None:
    """Against the config.json of HuggingFaceTB/SmolLM2-135M-Instruct."""
    assert run_app(["show", "smollm2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layers"], found["hidden_size"], found["vocabulary"]) == (30, 576, 49152)
    assert found["context"] == 8192
    assert found["num_parameters"] == 134_515_008
    assert found["memory"]["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert found["problem"] is None
