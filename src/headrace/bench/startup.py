"""headrace in fresh processes: time to the first token, the parts of loading, peak memory.

`command_seconds` starts the command line and waits for the first byte of an answer. `measure` runs
this file as a program that loads a model, fills its whole KV pool with one request and prints what
it saw as JSON. Processes are new each time; the page cache is as warm as the runs before left it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import EngineFailure
from headrace.observe import monotonic_s

TIMEOUT_S = 600.0
PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Started:
    """One process. **Units** seconds since the part before; bytes. `process`: until Python and the
    modules needed were there; `first_token`: of a request of `num_prompt` tokens."""

    process: float
    open: float
    tokenizer: float
    weights: float
    engine: float
    first_token: float
    num_prompt: int
    peak_bytes: int
    file_bytes: int
    kv_bytes: int

    @property
    def peak_ratio(self) -> float:
        """Peak resident memory over the file and the KV pool."""
        return self.peak_bytes / (self.file_bytes + self.kv_bytes)


def measure(path: Path, num_prompt: int, num_output: int, num_threads: int) -> Started:
    """A fresh process whose pool holds just one such request.

    **Raises** `EngineFailure` when it fails.
    """
    counts = map(str, (num_prompt, num_output, num_threads))
    command = [sys.executable, "-m", "headrace.bench.startup", str(path), *counts]
    begun = repr(monotonic_s())
    done = subprocess.run(
        [*command, begun], stdout=subprocess.PIPE, check=False, timeout=TIMEOUT_S, text=True
    )
    _check(done.returncode, command)
    return Started(**json.loads(done.stdout))


def command_seconds(path: Path, num_threads: int) -> float:
    """From the start of `headrace run` to the first byte of its answer.

    **Raises** `EngineFailure` when it fails.
    """
    options = ("--raw", "--temperature", "0", "--max-tokens", "4", "--ignore-eos", "--quiet")
    threads = ("--threads", str(num_threads))
    command = [sys.executable, "-m", "headrace.cli", "run", str(path), PROMPT, *options, *threads]
    begin_s = monotonic_s()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = monotonic_s() - begin_s
        process.stdout.read()
    _check(process.returncode, command)
    return seconds


def _check(code: int, command: list[str]) -> None:
    if code:
        what = shlex.join(command)
        raise EngineFailure(f"{what} ended with {code}; its own errors are on standard error")


# ---- the process itself


def main(args: list[str]) -> None:
    """PATH PROMPT OUTPUT THREADS BEGUN: `BEGUN` is the parent's clock, which is this one's too."""
    from headrace.bench import timing  # imports are a part of what is measured
    from headrace.bench.loading import open_engine
    from headrace.config import EngineConfig

    path, begun_s = Path(args[0]), float(args[4])
    num_prompt, num_output, num_threads = map(int, args[1:4])
    process_s = monotonic_s() - begun_s
    # One sequence of exactly this context: the planner makes the pool no larger.
    context = num_prompt + num_output
    config = EngineConfig(num_threads=num_threads, max_context=context, max_running=1)
    opened = open_engine(path, config)
    prompt = timing.Prompts(opened.model.spec.vocab_size, 0).make(num_prompt)
    (trace,) = timing.run(opened.engine, [timing.greedy(prompt, num_output, "first")])
    found = Started(
        process=process_s,
        **asdict(opened.seconds),
        first_token=trace.ttft_s,
        num_prompt=num_prompt,
        peak_bytes=peak_bytes(),
        file_bytes=opened.file_bytes,
        kv_bytes=opened.memory.kv_bytes,
    )
    opened.engine.close()
    print(json.dumps(asdict(found)))


def peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Peak resident memory of this process; 0 where the system does not tell. (Not `getrusage`: it
    remembers the process that was forked.)"""
    if not status.exists():
        return 0
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main(sys.argv[1:])
