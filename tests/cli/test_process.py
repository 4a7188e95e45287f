"""The command line as a process: Ctrl-C, lost readers, open pipes, terminals, start-up time."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

import headrace

FAKES = Path(__file__).parent / "cli_fakes.py"
WAIT_S = 30.0


def _command(tmp_path: Path, script: str, *args: str) -> list[str]:
    model = tmp_path / "tiny.gguf"
    model.touch()
    return [sys.executable, str(FAKES), str(tmp_path / "store"), script, "run", str(model), *args]


def _environment() -> dict[str, str]:
    source = str(Path(headrace.__file__).parents[1])
    found = {**os.environ, "PYTHONPATH": source, "TERM": "xterm", "PYTHONWARNINGS": "error"}
    return {name: value for name, value in found.items() if name != "NO_COLOR"}


@contextmanager
def _started(
    command: list[str],
    stdin: int = subprocess.DEVNULL,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive its test."""
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**_environment(), **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_ends_an_answer_with_130_and_no_traceback(tmp_path: Path) -> None:
    with _started(_command(tmp_path, "hanging", "Why?")) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"first"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (130, b"\n", b"")


def test_ctrl_c_before_a_command_has_begun_is_no_traceback() -> None:
    _run_python("""
        import sys
        from headrace.cli import main

        class Interrupted:
            def find_spec(self, name, path, target=None):
                if name == "typer":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupted())
        try:
            main(["ls"])
        except SystemExit as end:
            sys.exit(0 if end.code == 130 else 1)
    """)


def test_a_lost_reader_ends_it_quietly(tmp_path: Path) -> None:
    command = _command(tmp_path, "endless", "Why?", "--max-tokens", "1000000")
    with _started(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"tick\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "<&- >&-"])
def test_an_answer_that_cannot_be_written_is_one_line(tmp_path: Path, redirection: str) -> None:
    command = _command(tmp_path, "fixed", "Why?")
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *command]
    with _started(shell) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (1, b"")
    assert err.startswith(b"error: standard output: ")
    assert err.count(b"\n") == 1


def test_closed_input_and_errors_do_not_matter(tmp_path: Path) -> None:
    command = _command(tmp_path, "fixed", "Why?")
    with _started(["sh", "-c", '"$@" <&- 2>&-', "sh", *command]) as process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, b"one two\n")


def test_closed_input_without_a_prompt_is_an_empty_prompt(tmp_path: Path) -> None:
    with _started(["sh", "-c", '"$@" <&-', "sh", *_command(tmp_path, "fixed")]) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (1, b"")
    assert b"the prompt is empty" in err


@pytest.mark.parametrize("command", [["ls"], ["rm", "tiny"], ["pull", "pypi:tiny==1.0"]])
def test_a_store_that_cannot_be_made_is_one_line(tmp_path: Path, command: list[str]) -> None:
    settings = {"HEADRACE_HOME": str(tmp_path / ("x" * 300)), "HEADRACE_OFFLINE": "0"}
    started = [sys.executable, "-m", "headrace.cli", *command]
    with _started(started, environment=settings) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (1, b"")
    assert err.startswith(b"error: ")
    assert err.count(b"\n") == 1


def test_an_open_pipe_that_brings_nothing_does_not_hang_a_prompt(tmp_path: Path) -> None:
    command = _command(tmp_path, "fixed", "Why?")
    with _started(command, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(7) == b"one two"  # while standard input is still open
        _, err = process.communicate(timeout=WAIT_S)
    assert b"brought nothing" in err


def test_piped_text_follows_the_prompt(tmp_path: Path) -> None:
    command = _command(tmp_path, "fixed", "Sum up:")
    with _started(command, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(b"some text", timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, b"one two\n", b"")


def _run_python(code: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=_environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=WAIT_S,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_version_starts_nothing_heavy() -> None:
    shown = _run_python("""
        import sys
        from headrace.cli import main
        main(["--version"])
        heavy = {"typer", "rich", "numpy", "torch", "fastapi", "tokenizers"} & set(sys.modules)
        sys.exit(f"imported {heavy}" if heavy else 0)
    """)
    assert shown == f"headrace {headrace.__version__}\n"


def test_the_run_path_imports_no_server_and_no_torch() -> None:
    _run_python("""
        import sys
        import headrace.cli.app, headrace.service
        heavy = {"torch", "transformers", "fastapi", "uvicorn", "ray"} & set(sys.modules)
        sys.exit(f"imported {heavy}" if heavy else 0)
    """)


def test_ctrl_c_during_a_pull_ends_pip_and_keeps_the_state(tmp_path: Path) -> None:
    """A pip that never ends stands in; it tells its process id through a named pipe."""
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "fake" / "pip" / "__init__.py").touch()
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(
        f"import os, signal\nopen({str(fifo)!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n"
    )
    path = f"{tmp_path / 'fake'}{os.pathsep}{_environment()['PYTHONPATH']}"
    settings = {
        "HEADRACE_HOME": str(tmp_path / "store"),
        "HEADRACE_OFFLINE": "0",
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-m", "headrace.cli", "pull", "pypi:tiny==1.0"]
    with _started(command, environment=settings) as process:
        pip = int(fifo.read_text())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert (out, b"Traceback" in err) == (b"", False)
    with pytest.raises(ProcessLookupError):
        os.kill(pip, 0)


# ---- a terminal


class Keyboard:
    """The far end of a terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, text: str) -> str:
        """What was shown up to `text`, which must come."""
        while text not in self.seen:
            ready, _, _ = select.select([self._fd], [], [], WAIT_S)
            assert ready, f"{text!r} did not come; seen: {self.seen!r}"
            try:
                data = os.read(self._fd, 4096)
            except OSError:  # Linux: the other side has ended
                data = b""
            assert data, f"the program ended before {text!r}; seen: {self.seen!r}"
            self.seen += data.decode()
        before, _, self.seen = self.seen.partition(text)
        return before


@contextmanager
def _chat(
    tmp_path: Path, script: str, *args: str
) -> Iterator[tuple[Keyboard, subprocess.Popen[bytes]]]:
    near, far = pty.openpty()
    process = subprocess.Popen(
        _command(tmp_path, script, *args),
        stdin=far,
        stdout=far,
        stderr=far,
        env=_environment() | {"HOME": str(tmp_path), "INPUTRC": os.devnull},
        start_new_session=True,
    )
    os.close(far)
    try:
        yield Keyboard(near), process
    finally:
        process.kill()
        process.wait()
        os.close(near)


def test_a_chat_remembers_obeys_commands_and_leaves(tmp_path: Path) -> None:
    with _chat(tmp_path, "fixed") as (keyboard, process):
        keyboard.read_until(">>> ")
        keyboard.type("hello\r")
        keyboard.read_until("one two")
        keyboard.read_until(">>> ")
        keyboard.type('"""first\r')
        keyboard.read_until("... ")
        keyboard.type('second"""\r')
        keyboard.read_until("one two")
        for typed, shown in (
            ("/show", "messages 4"),
            ("/set temperature 0.25", "temperature 0.25"),
            ("/set parameter top_k 3", "top_k 3"),
            ("/set top_k x", "error:"),
            ("/set magic 1", "no parameter 'magic'"),
            ("/dance", "no command /dance"),
            ("/clear", "forgotten"),
            ("/show", "messages 0"),
            ("/help", "/bye"),
        ):
            keyboard.read_until(">>> ")
            keyboard.type(f"{typed}\r")
            keyboard.read_until(shown)
        keyboard.read_until(">>> ")
        keyboard.type("/bye\r")
        assert process.wait(WAIT_S) == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    with _chat(tmp_path, "hanging") as (keyboard, process):
        keyboard.read_until(">>> ")
        keyboard.type("hello\r")
        keyboard.read_until("first")
        process.send_signal(signal.SIGINT)
        keyboard.read_until(">>> ")
        process.send_signal(signal.SIGINT)  # at the prompt: the line goes, the chat stays
        keyboard.type("\r")  # Python sees a signal that came just before it began to wait
        keyboard.read_until("Ctrl-D or /bye leaves")
        keyboard.read_until(">>> ")
        keyboard.type("/show\r")
        keyboard.read_until("messages 2")
        keyboard.read_until(">>> ")
        keyboard.type("\x04")
        assert process.wait(WAIT_S) == 0


def test_history_survives_the_chat(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    with _chat(tmp_path, "fixed") as (keyboard, process):
        keyboard.read_until(">>> ")
        keyboard.type("a memorable line\r")
        keyboard.read_until("one two")
        keyboard.read_until(">>> ")
        keyboard.type("/bye\r")
        assert process.wait(WAIT_S) == 0
    history = tmp_path / "store" / "history"
    assert "a memorable line" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
