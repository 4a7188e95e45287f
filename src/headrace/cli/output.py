"""What the terminal shows beside the answer: errors, notes, progress bars, tables, numbers.

Answers and tables go to standard output; everything here that moves, warns or explains goes to
standard error, with colours and bars only on a terminal (rich also honours NO_COLOR). Without a
terminal a pull prints a plain line now and then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY = 0.1  # of a pull, without a terminal


class Terminal:
    """Standard error, for people. Quiet: errors and warnings only."""

    def __init__(self, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        if not self.is_quiet:
            self.console.print(text, style="dim", markup=False)

    def warn(self, text: str) -> None:
        self._headed("warning:", "bold yellow", text)

    def error(self, text: str) -> None:
        self._headed("error:", "bold red", text)

    def _headed(self, head: str, style: str, text: str) -> None:
        self.console.print(head, style=style, end=" ", markup=False)
        self.console.print(text, markup=False)


class Bars:
    """A store `Progress` drawn on the terminal; use it as a context."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._tasks: dict[str, TaskID] = {}
        self._lines: dict[str, float] = {}
        self._bars: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def note(self, text: str) -> None:
        self._terminal.note(text)

    def advance(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        if self._terminal.is_quiet:
            return
        if self._terminal.console.is_terminal:
            self._draw(label, done_bytes, total_bytes)
        else:
            self._print(label, done_bytes, total_bytes)

    def _draw(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        if self._bars is None:
            self._bars = _new_bars(self._terminal.console)
            self._bars.start()
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total_bytes)
        self._bars.update(self._tasks[label], completed=done_bytes, total=total_bytes)

    def _print(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        share = done_bytes / total_bytes if total_bytes else 0.0
        if label in self._lines and share < min(1.0, self._lines[label]):
            return
        if self._lines.get(label, 0.0) > 1.0:
            return
        self._lines[label] = (int(share / LINE_EVERY) + 1) * LINE_EVERY
        of = f" {share:4.0%} of {size(total_bytes)}" if total_bytes else ""
        self._terminal.note(f"{label}{of}")


def _new_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
    )


def size(num_bytes: float) -> str:
    """Decimal units, as shops and disks use: 98.4 MB."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= step:
            return f"{num_bytes / step:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns, never cut: the same on a terminal and in a pipe."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def say(text: str) -> None:
    """To standard output, at once.

    **Raises** `BrokenPipeError` when nobody reads, `OSError` naming standard output otherwise.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None
