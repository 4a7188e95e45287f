"""The thread pool: short jobs of many shapes, more threads than cores, owners that go at any time.

A hang shows as the suite's timeout, a claim of a chunk that is not there as a crash or wrong bits.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from forwards import Build, Span, attention_of, compiled, on_rows_of, step_of
from kernel_cases import Array, generator, native_weight, normal, raw_blocks, same_bits, stored

from headrace import _native
from headrace.backends.cpu import CpuOps
from headrace.backends.ops import (
    AttentionSpec,
    Batch,
    CompiledForward,
    KVSpec,
    Ops,
    StepArrays,
    Tensor,
)

MANY = 8  # threads: more than the cores of a small machine
KV = KVSpec(1, 2, 16, 3)


def chain(length: int) -> Build:
    """`length` linears, one after the other: two regions each."""
    weight = stored(np.eye(32, dtype=np.float32)[::-1].copy())

    def op(ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        w = ops.weight(weight)
        for _ in range(length):
            x = ops.linear(ops.scale(x, 2.0), w)
        return x

    return on_rows_of(normal(1, 40, 32), op)


def attention() -> Build:
    q, kv = normal(2, 40, 4, 16), normal(3, 40, 2, 16)
    return attention_of(q, kv, kv, AttentionSpec(0, 0.3))


BUILDS = (chain(0), chain(1), attention(), chain(12), chain(3))


def step(num_tokens: int) -> StepArrays:
    return step_of([Span(0, num_tokens, [2, 0, 1])])


def compile_all(ops: Ops) -> list[CompiledForward]:
    return [compiled(ops, build, KV, 40, 1) for build in BUILDS]


def expected_rows() -> list[Array]:
    return [run(step(40)).copy() for run in compile_all(CpuOps(1))]


def test_jobs_of_all_shapes_follow_each_other() -> None:
    """One region after forty, one chunk after a hundred: what a late thread remembers is stale."""
    expected, runs, rng = expected_rows(), compile_all(CpuOps(MANY)), generator(4)
    for which, tokens in zip(
        rng.integers(0, 5, 1500), rng.choice([1, 2, 9, 40], 1500), strict=True
    ):
        got = runs[which](step(int(tokens)))
        assert same_bits(got.copy(), expected[which][:tokens])


def test_owners_come_and_go_between_jobs() -> None:
    expected, rng = expected_rows(), generator(5)
    backends = [CpuOps(threads) for threads in (1, 2, MANY)]
    runs: list[tuple[int, CompiledForward]] = []
    for _ in range(200):
        ops = backends[rng.integers(len(backends))]
        which = int(rng.integers(len(BUILDS)))
        runs.append((which, compiled(ops, BUILDS[which], KV, 40, 1)))
        for which, run in runs:
            assert same_bits(run(step(7)).copy(), expected[which][:7])
        if len(runs) > 4:
            del runs[int(rng.integers(len(runs)))]
        if rng.random() < 0.2:
            backends[rng.integers(len(backends))] = CpuOps(int(rng.integers(1, MANY)))


def test_logits_outlive_the_backend_that_made_them() -> None:
    ops = CpuOps(3)
    run = compiled(ops, BUILDS[3], KV, 40, 1)
    got = run(step(40))
    kept = got.copy()
    del ops, run
    gc.collect()
    assert same_bits(got.copy(), kept)


@pytest.mark.parametrize("threads", [1, 2, 3, 17])
def test_idle_pools_end(threads: int) -> None:
    for _ in range(20):
        _native.Pool(threads)
    pools = [_native.Pool(threads) for _ in range(5)]
    del pools[::2], pools


def test_threads_of_python_take_turns() -> None:
    """Two callers on one pool, and weights packed meanwhile: jobs queue, none is torn."""
    ops = CpuOps(3)
    expected, runs = expected_rows(), compile_all(ops)
    tensor = raw_blocks("Q4_K", (100, 256), 6)
    first_row = native_weight(tensor).row(0)

    def call(which: int) -> bool:
        return all(same_bits(runs[which](step(40)).copy(), expected[which]) for _ in range(150))

    def pack() -> bool:
        return all(same_bits(ops.weight(tensor).native.row(0), first_row) for _ in range(50))

    with ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(call, which) for which in (1, 2, 3)]
        assert callers.submit(pack).result()
        assert all(future.result() for future in calls)


def test_one_program_is_never_run_by_two_callers_at_once() -> None:
    """Its logits are overwritten by the next call, but nothing breaks."""
    run = compiled(CpuOps(3), attention(), KV, 40, 1)
    with ThreadPoolExecutor(3) as callers:
        list(callers.map(run, [step(n) for n in (1, 17, 40) * 200]))
    assert same_bits(run(step(40)).copy(), expected_rows()[2])
