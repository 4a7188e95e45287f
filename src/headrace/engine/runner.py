"""Plan -> arrays -> forward -> one token per finished row: the only place a step's arrays are made.

Keeps, per open job, what must not be rebuilt each step: its row of the page table and its sampling
state. The page table changes only where the plan says so, hence a decode step costs a few integer
operations per job, whatever its context. A row of logits that cannot be sampled ends its own job;
an exception of the forward is the loop's to handle.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ops import PAGE_SIZE, CompiledForward, StepArrays
from headrace.engine.program import Job
from headrace.engine.sampler import DrawResult, DrawRule, History, Scratch, draw, draw_rule
from headrace.engine.scheduler import Outcome, Plan, Work
from headrace.types import FinishReason


class _Sequence:
    """Sampling state of an open job, and its row of the page table while it runs (-1: none)."""

    __slots__ = ("end_ids", "history", "row", "rule")

    def __init__(self, job: Job, eos_token_ids: frozenset[int]) -> None:
        params = job.params
        eos = frozenset[int]() if params.ignore_eos else eos_token_ids
        prompt = tuple(job.tokens[: job.num_prompt])
        self.end_ids = eos.union(params.stop_token_ids)
        self.rule: DrawRule = draw_rule(params, job.seed, job.index, self.end_ids, len(prompt))
        self.history = History(prompt) if self.rule.has_penalties else None
        self.row = -1


class Runner:
    """Runs plans on one compiled forward. `open` a job before its first work, `close` it after the
    last."""

    def __init__(
        self,
        forward: CompiledForward,
        *,
        max_running: int,
        max_context: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._forward = forward
        self._eos = frozenset(eos_token_ids)
        self._sequences: dict[int, _Sequence] = {}
        self._table: NDArray[np.int32] = np.full(
            (max_running, -(-max_context // PAGE_SIZE)), -1, dtype=np.int32
        )
        self._scratch: Scratch | None = None
        self._free_rows = list(range(max_running - 1, -1, -1))

    def open(self, job: Job) -> None:
        """Prepare the sampling state of a job."""
        self._sequences[job.id] = _Sequence(job, self._eos)

    def close(self, job_id: int) -> None:
        """Forget a job."""
        sequence = self._sequences.pop(job_id, None)
        if sequence is not None:
            self._drop_row(sequence)

    def shut(self) -> None:
        """Let go of the forward and its memory."""
        self._forward = _shut

    def run(self, plan: Plan) -> list[Outcome]:
        """One forward; outcomes in the order of the works."""
        for job_id in plan.preempted:
            sequence = self._sequences.get(job_id)
            if sequence is not None:
                self._drop_row(sequence)
        sequences = [self._sequences[work.job_id] for work in plan.works]
        for sequence, work in zip(sequences, plan.works, strict=True):
            if work.new_pages:
                self._write_pages(sequence, work)
        logits = self._forward(self._gather(plan.works, sequences))
        return self._advance(plan.works, sequences, logits)

    # ---- arrays

    def _write_pages(self, sequence: _Sequence, work: Work) -> None:
        if sequence.row < 0:
            assert work.first_page == 0, "a sequence without a row must send all its pages"
            sequence.row = self._free_rows.pop()
        end = work.first_page + len(work.new_pages)
        self._table[sequence.row, work.first_page : end] = work.new_pages

    def _drop_row(self, sequence: _Sequence) -> None:
        if sequence.row >= 0:
            self._table[sequence.row] = -1
            self._free_rows.append(sequence.row)
            sequence.row = -1

    def _gather(self, works: tuple[Work, ...], sequences: list[_Sequence]) -> StepArrays:
        tokens: list[int] = []
        positions: list[int] = []
        bounds, lens, rows = [0], [], []
        for work in works:
            start, count = work.start, work.num_units
            tokens.extend(work.tokens)
            if count == 1:
                positions.append(start)
            else:
                positions.extend(range(start, start + count))
            bounds.append(len(tokens))
            lens.append(start + count)
            if work.wants_output:
                rows.append(len(tokens) - 1)
        width = -(-max(lens) // PAGE_SIZE)
        table_rows = [sequence.row for sequence in sequences]
        return StepArrays(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            cu_seqlens=np.array(bounds, dtype=np.int32),
            context_lens=np.array(lens, dtype=np.int32),
            page_table=self._table[table_rows, :width],
            rows=np.array(rows, dtype=np.int32),
        )

    # ---- the update rule

    def _advance(
        self,
        works: tuple[Work, ...],
        sequences: list[_Sequence],
        logits: NDArray[np.float32],
    ) -> list[Outcome]:
        outcomes = []
        row = 0
        if self._scratch is None:
            self._scratch = Scratch(logits.shape[1])
        for sequence, work in zip(sequences, works, strict=True):
            if work.wants_output:
                position = work.start + work.num_units
                drawn = draw(logits[row], sequence.rule, position, sequence.history, self._scratch)
                outcomes.append(_outcome(sequence, work, drawn))
                row += 1
            else:
                outcomes.append(Outcome(work.num_units))
        assert row == len(logits), "the forward gave another number of rows than asked for"
        return outcomes


def _shut(arrays: StepArrays) -> NDArray[np.float32]:
    raise AssertionError("the runner was shut")


def _outcome(sequence: _Sequence, work: Work, drawn: DrawResult) -> Outcome:
    if drawn.error is not None:
        return Outcome(work.num_units, reason="error", error=drawn.error)
    token = drawn.token_id
    if sequence.history is not None:
        sequence.history.push(token)
    logprobs = () if drawn.logprob is None else (drawn.logprob,)
    reason: FinishReason | None = "stop" if token in sequence.end_ids else None
    return Outcome(work.num_units, (token,), logprobs, reason)
