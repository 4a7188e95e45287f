"""Time to first token with a 1,000-token shared prompt: cold, and when the prefix cache has it.

Each pair takes a new shared prompt; both requests end in 16 tokens of their own, so a hit still
computes those and what is left of the last page.

    python bench/engine/prefix_hit.py [MODEL]
"""

from __future__ import annotations

import argparse
import statistics

from headrace.bench import timing
from headrace.bench.measuring import spread

SHARED = 1000
OWN = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    service = timing.load(options.model, num_threads=options.threads)
    prompts = timing.Prompts(service.model.vocab_size, seed=2)
    timing.run(service.client, [timing.greedy(prompts.make(64), 8, "warm-up")])
    cold: list[float] = []
    hit: list[float] = []
    for i in range(options.pairs):
        shared = prompts.make(SHARED)
        for kind, times in (("cold", cold), ("hit", hit)):
            request = timing.greedy(shared + prompts.make(OWN), 1, f"{kind}{i}")
            (trace,) = timing.run(service.client, [request])
            assert (trace.cached_tokens > 0) == (kind == "hit"), (kind, trace.cached_tokens)
            times.append(trace.ttft_s)
    service.close()
    print(f"cold TTFT ms: {spread([1e3 * t for t in cold])}")
    print(f"hit  TTFT ms: {spread([1e3 * t for t in hit])}, {trace.cached_tokens} cached")
    ratios = [c / h for c, h in zip(cold, hit, strict=True)]
    print(f"ratio: {spread(ratios)} over {len(ratios)} pairs")
    print(f"at least 10x: {'yes' if statistics.median(ratios) >= 10 else 'NO'}")


if __name__ == "__main__":
    main()
