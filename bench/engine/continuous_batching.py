"""Continuous against static batching on the same 64 requests of mixed lengths.

Static means groups of 16 in order of arrival, the next group starting when the last has ended. It
is emulated on the same engine, in two forms: padded, as static batching is usually built (every row
is computed until the longest answer of its group is done; only the tokens asked for count), and
with finished rows dropped, which no one builds but which isolates the waiting. Continuous takes all
64 at once: with the engine's own limit of running sequences, and with 16 as static has. Prompts are
16 to 128 tokens and answers 4 to 256, log-uniform: many short answers, a few long ones.

    python bench/engine/continuous_batching.py [MODEL]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench import timing
from headrace.bench.measuring import spread
from headrace.service import Service

NUM_REQUESTS = 64
GROUP = 16
PROMPT = (16, 128)
OUTPUT = (4, 256)
PADDED = "static, padded"
CONTINUOUS = "continuous"


@dataclass(frozen=True)
class Shape:
    """Tokens of one request."""

    prompt: int
    output: int


Way = tuple[Service, Sequence[Sequence[Shape]]]


def shapes(seed: int) -> list[Shape]:
    """The same 64 for every way of batching."""
    draw = random.Random(seed)

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    return [Shape(log_uniform(*PROMPT), log_uniform(*OUTPUT)) for _ in range(NUM_REQUESTS)]


def seconds(service: Service, groups: Sequence[Sequence[Shape]], prompts: timing.Prompts) -> float:
    """Time of all groups, one after another."""
    total_s = 0.0
    for group in groups:
        requests = [
            timing.greedy(prompts.make(shape.prompt), shape.output, f"r{i}")
            for i, shape in enumerate(group)
        ]
        total_s += timing.span_s(timing.run(service.client, requests))
    return total_s


def padded(group: Sequence[Shape]) -> list[Shape]:
    """Every row as long as the longest."""
    prompt, output = max(s.prompt for s in group), max(s.output for s in group)
    return [Shape(prompt, output)] * len(group)


def ways_of(services: dict[str, Service], work: Sequence[Shape]) -> dict[str, Way]:
    """Each way of batching the work, as an engine and its groups."""
    groups = [work[i : i + GROUP] for i in range(0, len(work), GROUP)]
    return {
        PADDED: (services["default"], [padded(group) for group in groups]),
        "static, rows dropped": (services["default"], groups),
        CONTINUOUS: (services["default"], [work]),
        "continuous, 16 running": (services["sixteen"], [work]),
    }


def measure(ways: dict[str, Way], repeat: int) -> dict[str, list[float]]:
    """Seconds by way of batching, alternating."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    prompts = timing.Prompts(ways[PADDED][0].model.vocab_size, seed=3)
    for _ in range(repeat):
        for name, (service, groups) in ways.items():
            found[name].append(seconds(service, groups, prompts))
            print(f"  {name}: {found[name][-1]:.2f} s", flush=True)
    return found


def report(found: dict[str, list[float]], num_output: int) -> None:
    """Throughput of the tokens asked for, and the gain over padded static batching."""
    gains = {
        name: [s / t for s, t in zip(found[PADDED], times, strict=True)]
        for name, times in found.items()
    }
    for name, times in found.items():
        rate = spread([num_output / t for t in times])
        print(f"{name:22} {rate} output tokens/s, {spread(gains[name])} x {PADDED}")
    print(f"at least 2x: {'yes' if statistics.median(gains[CONTINUOUS]) >= 2 else 'NO'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    common = {"num_threads": options.threads, "prefix_cache": False}
    services = {
        "default": timing.load(options.model, **common),
        "sixteen": timing.load(options.model, max_running=GROUP, **common),
    }
    work = shapes(options.seed)
    num_prompt, num_output = sum(s.prompt for s in work), sum(s.output for s in work)
    print(f"{len(work)} requests, {num_prompt} prompt and {num_output} output tokens")
    report(measure(ways_of(services, work), options.repeat), num_output)
    for service in services.values():
        service.close()


if __name__ == "__main__":
    main()
