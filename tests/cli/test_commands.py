"""`serve`, `ls`, `rm`, `show`, `pull`: what they print and what they hand on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_fakes import FakeWorld

from headrace.cli import main
from headrace.cli.app import run_app
from headrace.cli.output import Bars, Terminal, size, table
from headrace.cli.serve import is_loopback
from headrace.cli.show import count_types
from headrace.formats.names import PathName, parse_name
from headrace.types import Checkpoint, StoredTensor

Captured = pytest.CaptureFixture[str]


def _store_model(world: FakeWorld, name: str) -> Path:
    """A pulled model, as its manifest tells it."""
    target = parse_name(name)
    assert not isinstance(target, PathName)
    folder = world.root / "models" / target.slug
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF1234")
    manifest = {
        "id": name,
        "source": name,
        "licence": "CC0-1.0",
        "revision": None,
        "entry": "m.gguf",
        "files": [{"path": "m.gguf", "num_bytes": 8, "sha256": "0" * 64}],
        "pulled": "2026-01-02T03:04:05Z",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "m.gguf"


def test_main_ends_with_the_exit_code(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["frobnicate"])
    assert caught.value.code == 2
    assert "frobnicate" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "serve", "pull", "ls", "rm", "show"])
def test_every_command_has_help_with_an_example(
    world: FakeWorld, capsys: Captured, command: str
) -> None:
    assert run_app([command, "--help"], world.tools()) == 0
    assert f"headrace {command}" in capsys.readouterr().out.partition("Examples:")[2]


def test_ls_is_a_table_and_json(world: FakeWorld, capsys: Captured) -> None:
    assert run_app(["ls"], world.tools()) == 0
    assert "is empty" in capsys.readouterr().err
    path = _store_model(world, "pypi:tiny==1.0")
    assert run_app(["ls"], world.tools()) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SIZE", "FORMAT", "PULLED", "PATH"]
    assert row.split()[0] == "pypi:tiny==1.0"
    assert row.endswith(str(path))
    assert run_app(["ls", "--json"], world.tools()) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["id"], found["num_bytes"], found["path"]) == ("pypi:tiny==1.0", 8, str(path))


def test_ls_tells_of_unfinished_pulls(world: FakeWorld, capsys: Captured) -> None:
    partial = world.root / "partial" / "gemma3-270m"
    partial.mkdir(parents=True)
    (partial / "name").write_text("gemma3:270m\n")
    assert run_app(["ls"], world.tools()) == 0
    assert "'headrace pull gemma3:270m' resumes it" in capsys.readouterr().err
    assert run_app(["rm", "gemma3:270m"], world.tools()) == 0
    assert not partial.exists()


def test_rm_removes_and_tells(world: FakeWorld, capsys: Captured) -> None:
    path = _store_model(world, "smollm2:135m")
    assert run_app(["rm", "smollm2"], world.tools()) == 0
    assert not path.exists()
    assert run_app(["rm", "smollm2"], world.tools()) == 1
    assert "not in the store" in capsys.readouterr().err


def test_pull_of_a_model_that_is_here_needs_nothing(world: FakeWorld, capsys: Captured) -> None:
    path = _store_model(world, "smollm2:135m")
    assert run_app(["pull", "smollm2"], world.tools()) == 0
    assert str(path) in capsys.readouterr().err.replace("\n", "")
    assert run_app(["pull", "smollm2", "--verify"], world.tools()) == 1
    assert "manifest says" in capsys.readouterr().err


# ---- serve


def test_serve_offers_the_default_and_catalogue_names(world: FakeWorld, capsys: Captured) -> None:
    _store_model(world, "smollm2:135m")
    assert run_app(["serve", "--port", "8123"], world.tools()) == 0
    assert list(world.served) == ["smollm2:135m"]
    assert world.server_config is not None
    assert (world.server_config.host, world.server_config.port) == ("127.0.0.1", 8123)
    err = capsys.readouterr().err
    assert "http://127.0.0.1:8123/v1" in err
    assert "12 MiB in all" in err
    assert "warning" not in err


def test_serve_names_a_file_by_its_stem(world: FakeWorld, model: str) -> None:
    _store_model(world, "gemma3:270m")
    assert run_app(["serve", model, "gemma3", "--threads", "1"], world.tools()) == 0
    assert list(world.served) == ["tiny", "gemma3:270m"]
    assert all(config.num_threads == 1 for _, config in world.opened)


def test_serve_refuses_two_models_of_one_name(
    world: FakeWorld, model: str, tmp_path: Path, capsys: Captured
) -> None:
    other = tmp_path / "other" / "tiny.gguf"
    other.parent.mkdir()
    other.touch()
    assert run_app(["serve", model, str(other)], world.tools()) == 1
    assert "two models would be served as 'tiny'" in capsys.readouterr().err


def test_serve_on_an_open_address_warns(world: FakeWorld, model: str, capsys: Captured) -> None:
    assert run_app(["serve", model, "--host", "0.0.0.0"], world.tools()) == 0
    assert "warning: 0.0.0.0 is reachable from other machines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


# ---- show


def test_show_of_a_model_that_is_not_here_does_not_fetch(
    world: FakeWorld, capsys: Captured
) -> None:
    assert run_app(["show", "smollm2"], world.tools()) == 1
    assert "'headrace pull smollm2:135m' fetches it" in capsys.readouterr().err


def test_show_tells_why_a_model_will_not_load(
    world: FakeWorld, model: str, capsys: Captured
) -> None:
    world.metadata = {
        "general.architecture": "mystery",
        "general.license": "mit",
        "tokenizer.chat_template": "{{ x }}",
    }
    assert run_app(["show", model], world.tools()) == 0
    out = capsys.readouterr().out
    assert "architecture  mystery" in out
    assert "licence       mit" in out
    assert "template      sha256 " in out
    assert "it will not load" in out
    assert run_app(["show", model, "--json"], world.tools()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["memory"]) == ("mystery", None)
    assert "mystery" in found["problem"]


def test_types_are_counted_largest_first() -> None:
    def tensor(name: str, kind: str, num_bytes: int) -> StoredTensor:
        return StoredTensor(name, kind, (1,), np.zeros(num_bytes, np.uint8))

    tensors = [tensor("a", "F32", 4), tensor("b", "Q4_1", 20), tensor("c", "F32", 8)]
    found = count_types(Checkpoint("x", "gguf", {}, {item.name: item for item in tensors}))
    assert [(item.kind, item.num_tensors, item.num_bytes) for item in found] == [
        ("Q4_1", 1, 20),
        ("F32", 2, 12),
    ]


# ---- what pulls look like


def test_without_a_terminal_a_pull_is_a_few_lines(capsys: Captured) -> None:
    with Bars(Terminal()) as bars:
        for done in range(1001):
            bars.advance("pulling x", done * 1000, 1_000_000)
            bars.advance("pulling y", done, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "pulling x   0% of 1.0 MB"
    assert lines[-1] == "pulling x 100% of 1.0 MB"
    assert lines.count("pulling y") == 1
    assert len(lines) == 12


def test_quiet_bars_say_nothing(capsys: Captured) -> None:
    with Bars(Terminal(is_quiet=True)) as bars:
        bars.note("hello")
        bars.advance("pulling x", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_sizes_and_tables() -> None:
    assert [size(n) for n in (12, 98_362_432, 2.5e9, 1500)] == [
        "12 B",
        "98.4 MB",
        "2.5 GB",
        "1.5 kB",
    ]
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"
