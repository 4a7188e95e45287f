"""`headrace bench`: options to settings, reports to text and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.bench import kernels, offline
from headrace.bench.kernels import KernelSettings
from headrace.bench.measuring import Progress, Table
from headrace.bench.offline import OfflineSettings
from headrace.cli.app import run_app
from headrace.cli.bench import show_tables

Captured = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class FakeReport:
    settings: KernelSettings | OfflineSettings

    def tables(self) -> tuple[Table, ...]:
        plain = Table("machine", ("", ""), (("processor", "Mill"),))
        return plain, Table("speed", ("op", "GB/s"), (("linear", "12.5 (11-13)"),))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What reached the benchmarks; they themselves have tests of their own."""
    calls: list[object] = []

    def fake_kernels(settings: KernelSettings, progress: Progress) -> FakeReport:
        progress("linear")
        calls.append(settings)
        return FakeReport(settings)

    def fake_offline(
        name: str, path: Path, settings: OfflineSettings, progress: Progress
    ) -> FakeReport:
        calls.extend([name, path, settings])
        return FakeReport(settings)

    monkeypatch.setattr(kernels, "bench_kernels", fake_kernels)
    monkeypatch.setattr(offline, "bench_offline", fake_offline)
    return calls


def test_kernel_options_become_settings(seen: list[object], capsys: Captured) -> None:
    args = ["--types", "Q4_1,Q6_K", "--tokens", "1,8", "--sizes", "512,256"]
    assert run_app(["bench", "kernels", *args, "--threads", "3", "--repeat", "9"]) == 0
    expected = KernelSettings(
        types=("Q4_1", "Q6_K"), tokens=(1, 8), rows=512, columns=256, num_threads=3, repeat=9
    )
    assert seen == [expected]
    out, err = capsys.readouterr()
    assert err == "linear\n"
    assert out == ("machine\nprocessor  Mill\n\nspeed\nop      GB/s\nlinear  12.5 (11-13)\n\n")


def test_defaults_are_those_of_the_settings(
    seen: list[object], small_model: Path, capsys: Captured
) -> None:
    assert run_app(["bench", "kernels"]) == 0
    assert run_app(["bench", "offline", str(small_model)]) == 0
    assert seen == [KernelSettings(), "small", small_model, OfflineSettings()]


def test_offline_options_become_settings(seen: list[object], small_model: Path) -> None:
    args = ["--prompt", "64", "--generate", "16", "--batch", "2,4", "--depth", "7"]
    more = ["--starts", "0", "--threads", "2", "--repeat", "3"]
    assert run_app(["bench", "offline", str(small_model), *args, *more]) == 0
    assert seen[2] == OfflineSettings(64, 16, (2, 4), (7,), repeat=3, num_threads=2, num_starts=0)


def test_the_report_is_written_as_json(
    seen: list[object], tmp_path: Path, capsys: Captured
) -> None:
    assert run_app(["bench", "kernels", "--json", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["settings"]["tokens"] == [1, 4, 8, 64]
    assert run_app(["bench", "kernels", "--json", str(tmp_path / "no" / "r.json")]) == 1
    assert "no/r.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["kernels", "--tokens", "1,x"], "'1,x' is not a list of numbers"),
        (["kernels", "--sizes", "64"], "'64' is not N,K"),
        (["offline", "MODEL", "--batch", ""], "'' is not a list of numbers"),
        (["offline", "MODEL", "--batch", "0"], "batches are (0,)"),
    ],
)
def test_bad_lists_are_refused_with_an_example(
    seen: list[object], small_model: Path, capsys: Captured, args: list[str], message: str
) -> None:
    args = [str(small_model) if arg == "MODEL" else arg for arg in args]
    assert run_app(["bench", *args]) == 1
    assert message in capsys.readouterr().err
    assert seen == []


@pytest.mark.parametrize("command", ["kernels", "offline"])
def test_each_has_help_with_examples(capsys: Captured, command: str) -> None:
    assert run_app(["bench", command, "--help"]) == 0
    assert f"headrace bench {command}" in capsys.readouterr().out.partition("Examples:")[2]


def test_on_a_terminal_tables_are_drawn(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_tables(FakeReport(KernelSettings()).tables())
    out = capsys.readouterr().out
    assert "12.5 (11-13)" in out
    assert "───" in out
