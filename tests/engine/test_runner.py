"""The runner alone: what it gathers from a plan, and what it gives up when told."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from toy import VOCAB, logits_after

from headrace.backends.ops import StepArrays
from headrace.engine.program import TOKENS, Job, token_jobs
from headrace.engine.runner import Runner
from headrace.engine.scheduler import Plan, Work
from headrace.types import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Tape:
    """A forward that keeps its inputs."""

    def __init__(self) -> None:
        self.steps: list[StepArrays] = []

    def __call__(self, step: StepArrays) -> NDArray[np.float32]:
        self.steps.append(step)
        rows = [logits_after(step.token_ids[: row + 1].tolist()) for row in step.rows]
        return np.array(rows, dtype=np.float32).reshape(-1, VOCAB)


def job(job_id: int, *prompt: int) -> Job:
    (made,) = token_jobs(Request(str(job_id), prompt, GREEDY), job_id, 0, 100)
    return made


def work(job_id: int, start: int, tokens: tuple[int, ...], pages: tuple[int, ...] = ()) -> Work:
    return Work(job_id, 0, start, len(tokens), tokens, 0, pages, wants_output=True)


def runner(forward: Tape, max_running: int) -> Runner:
    return Runner(forward, max_running=max_running, max_context=64, eos_token_ids=(0,))


def test_arrays_of_a_mixed_step() -> None:
    tape = Tape()
    it = runner(tape, 2)
    it.open(job(0, *range(1, 18)))
    it.open(job(1, 9, 8, 7))
    it.run(Plan(TOKENS, (work(0, 0, tuple(range(1, 18)), (5, 3)),)))
    chunk = Work(1, 0, 0, 2, (9, 8), 0, (7,), wants_output=False)
    outcomes = it.run(Plan(TOKENS, (work(0, 17, (40,)), chunk)))
    step = tape.steps[1]
    assert step.token_ids.tolist() == [40, 9, 8]
    assert step.positions.tolist() == [17, 0, 1]
    assert step.cu_seqlens.tolist() == [0, 1, 3]
    assert step.context_lens.tolist() == [18, 2]
    assert step.page_table.tolist() == [[5, 3], [7, -1]]
    assert step.rows.tolist() == [0]
    assert [len(o.tokens) for o in outcomes] == [1, 0]
    assert [o.accepted for o in outcomes] == [1, 2]


def test_a_preempted_job_gives_its_row_of_the_page_table_up() -> None:
    it = runner(Tape(), 1)
    it.open(job(0, 1, 2))
    it.open(job(1, 3, 4))
    it.run(Plan(TOKENS, (work(0, 0, (1, 2), (4,)),)))
    it.run(Plan(TOKENS, (work(1, 0, (3, 4), (4,)),), preempted=(0,)))
    it.close(1)
    it.run(Plan(TOKENS, (work(0, 0, (1, 2), (6,)),)))


def test_pages_may_be_replaced_in_place() -> None:
    """A page that turned out to be a copy of a cached one is swapped for it."""
    tape = Tape()
    it = runner(tape, 1)
    it.open(job(0, *range(1, 40)))
    it.run(Plan(TOKENS, (work(0, 0, tuple(range(1, 40)), (1, 2, 3)),)))
    it.run(Plan(TOKENS, (Work(0, 0, 39, 1, (9,), 1, (8, 3), wants_output=True),)))
    assert tape.steps[1].page_table.tolist() == [[1, 8, 3]]


def test_a_first_work_without_pages_from_the_start_is_our_bug() -> None:
    it = runner(Tape(), 1)
    it.open(job(0, 1, 2))
    bad = Work(0, 0, 0, 2, (1, 2), 1, (4,), wants_output=True)
    with pytest.raises(AssertionError, match="must send all its pages"):
        it.run(Plan(TOKENS, (bad,)))


def test_shut_lets_go() -> None:
    it = runner(Tape(), 1)
    it.open(job(0, 1, 2))
    it.shut()
    with pytest.raises(AssertionError, match="was shut"):
        it.run(Plan(TOKENS, (work(0, 0, (1, 2), (4,)),)))
