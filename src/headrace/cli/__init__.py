"""The command line's front door: answers `--version` at once, hands everything else to `app`.

Nothing heavy is imported before a command needs it, so that `headrace --version` costs little more
than starting Python.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace import __version__


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command line and ends the process with its exit code."""
    args = sys.argv[1:] if argv is None else list(argv)
    if args in (["--version"], ["-V"]):
        print(f"headrace {__version__}")
        return
    try:
        from headrace.cli.app import run_app  # not above: --version must not wait for typer

        code = run_app(args)
    except KeyboardInterrupt:  # before a command has begun
        code = 130
    sys.exit(code)
