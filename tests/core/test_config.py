"""Where the store is: the environment's word, or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import store_config
from headrace.errors import InvalidRequest


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"HEADRACE_HOME": "/models", "XDG_CACHE_HOME": "/cache"}, "/models"),
        ({"HEADRACE_HOME": "", "XDG_CACHE_HOME": "/cache"}, "/cache/headrace"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/headrace"),
        ({}, "/home/someone/.cache/headrace"),
    ],
)
def test_the_store_is_where_the_environment_says(
    environ: dict[str, str], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert store_config(environ).root == Path(root)


@pytest.mark.parametrize("given", ["models", "./models", "~", "~/models", " "])
def test_a_relative_store_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match="HEADRACE_HOME"):
        store_config({"HEADRACE_HOME": given})


def test_a_user_without_a_home_needs_headrace_home_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert store_config({"HEADRACE_HOME": "/models"}).root == Path("/models")
    with pytest.raises(InvalidRequest, match="set HEADRACE_HOME"):
        store_config({})
