"""Measures one workload on headrace and prints tokens per second as JSON: the worker of
`bench/peers/llama_cpp_pairs.py`, a process of its own so that engines never share a machine.

    python bench/engine/rates.py MODEL --streams 16 --prompt 128 --output 128
"""

from __future__ import annotations

import argparse
import json

from headrace.bench import timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    service = timing.load(options.model, num_threads=options.threads, prefix_cache=False)
    prompts = timing.Prompts(service.model.vocab_size, seed=1)
    timing.run(service.client, [timing.greedy(prompts.make(32), 8, "warm-up")])
    for i in range(options.repeat):
        requests = [
            timing.greedy(prompts.make(options.prompt), options.output, f"{i}.{k}")
            for k in range(options.streams)
        ]
        print(json.dumps(rates(timing.run(service.client, requests), options)), flush=True)
    service.close()


def rates(traces: list[timing.Trace], options: argparse.Namespace) -> dict[str, float]:
    """`prefill` up to the last first token; `decode` while all were decoding; `total` of both."""
    begin_s = min(trace.submitted_s for trace in traces)
    prefilled_s = max(trace.token_times_s[0] for trace in traces) - begin_s
    num_tokens = options.streams * (options.prompt + options.output)
    found = {
        "prefill": options.streams * options.prompt / prefilled_s,
        "total": num_tokens / timing.span_s(traces),
    }
    if options.output > 1:
        found["decode"] = timing.full_batch_rate(traces)
    return found


if __name__ == "__main__":
    main()
