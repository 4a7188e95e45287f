"""One bad request hurts nobody else: aborts, failing steps, sinks and allocations, limits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from toy import TIMEOUT_S, VOCAB, Collector, Gate, Setup, ToyOps, ask, engine, expected

from headrace.errors import ContextTooLong, EngineFailure, InvalidRequest, Overloaded
from headrace.types import Event, Request, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class AbortAt(Collector):
    """Aborts its request from inside the sink after `count` tokens, as a stop string does."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.abort: Callable[[], None]

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if len(self.events) == self.count:
            self.abort()


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 39])
def test_abort_from_the_sink_ends_within_one_step(count: int) -> None:
    with engine(Setup()) as it:
        other = ask(it, "other", [9] * 20, LONG)
        sink = AbortAt(count)
        sink.abort = lambda: it.abort("a")
        it.submit(Request("a", (1, 2, 3), LONG), sink)
        assert sink.last().finish_reason == "abort"
        assert sink.tokens() == expected([1, 2, 3], LONG)[:count]
        assert other.tokens() == expected([9] * 20, LONG)
        assert it.stats().requests_aborted == 1


def test_abort_while_the_step_runs_and_while_waiting() -> None:
    gate = Gate()
    with engine(Setup(max_running=1, ops=ToyOps(before=gate))) as it:
        running, waiting = ask(it, "run", [1] * 40, LONG), ask(it, "wait", [2] * 40, LONG)
        assert gate.entered.wait(TIMEOUT_S)
        it.abort("run")
        it.abort("wait")
        it.abort("unknown")
        gate.opened.set()
        assert [e.finish_reason for e in waiting.wait()] == ["abort"]
        assert running.last().finish_reason == "abort"
        assert len(running.tokens()) <= 1
        assert ask(it, "next", [3], LONG).tokens() == expected([3], LONG)


def test_every_choice_of_an_aborted_request_ends() -> None:
    gate = Gate()
    with engine(Setup(max_running=2, ops=ToyOps(before=gate))) as it:
        sink = ask(it, "a", [1] * 40, replace(LONG, n=5))
        assert gate.entered.wait(TIMEOUT_S)
        it.abort("a")
        gate.opened.set()
        assert sorted(e.index for e in sink.wait() if e.finish_reason == "abort") == list(range(5))


def test_one_choice_can_be_aborted_alone() -> None:
    params = replace(LONG, n=3, temperature=1.0, seed=4)
    with engine(Setup()) as it:

        class Sink(Collector):
            def __call__(self, event: Event) -> None:
                super().__call__(event)
                if event.index == 1 and event.finish_reason is None:
                    it.abort("a", 1)

        sink = Sink(3)
        it.submit(Request("a", (1, 2, 3), params), sink)
        assert sink.last(1).finish_reason == "abort"
        assert sink.tokens(1) == expected([1, 2, 3], params, 1)[:1]
        for choice in (0, 2):
            assert sink.tokens(choice) == expected([1, 2, 3], params, choice)


def test_every_failing_allocation_changes_no_answer() -> None:
    prompts = [[i + 1] * size for i, size in enumerate((3, 17, 40, 33, 20, 16))]
    answers = [expected(prompt, LONG) for prompt in prompts]
    setup = Setup(num_pages=14, max_context=96, step_tokens=48, max_running=4)
    total, nth = 1, 0
    while nth < total:
        with engine(replace(setup, failing_take=nth)) as it:
            sinks = [ask(it, str(i), prompt, LONG) for i, prompt in enumerate(prompts)]
            assert [sink.tokens() for sink in sinks] == answers
            total = it.num_takes if nth == 0 else total
        nth += 1
    assert total > 20


# ---- steps and rows that fail


def test_a_step_that_raises_fails_its_jobs_only() -> None:
    def explode(sequences: list[list[int]]) -> None:
        if any(sequence[0] == 13 for sequence in sequences):
            raise RuntimeError("boom")

    with engine(Setup(ops=ToyOps(before=explode))) as it:
        before = ask(it, "before", [1, 2], LONG)
        before.wait()
        bad = ask(it, "bad", [13, 2], LONG).last()
        assert bad.finish_reason == "error"
        assert bad.error is not None
        assert "RuntimeError: boom" in bad.error
        assert ask(it, "after", [1, 2], LONG).tokens() == expected([1, 2], LONG)
        assert it.stats().requests_failed == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unusable_logits_end_their_own_request(bad: float) -> None:
    ops = ToyOps(poison=lambda known: bad if known[0] == 13 and len(known) > 4 else None)
    gate = Gate()
    ops.before = gate
    with engine(Setup(ops=ops)) as it:
        good = ask(it, "good", [1, 2], LONG)
        poor = ask(it, "poor", [13, 2], LONG)
        gate.opened.set()
        last = poor.last()
        assert last.finish_reason == "error"
        assert last.error is not None
        assert "logits" in last.error
        assert poor.tokens() == expected([13, 2], LONG)[:3]
        assert good.tokens() == expected([1, 2], LONG)


def test_a_sink_that_raises_aborts_its_own_request() -> None:
    class Broken(Collector):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if len(self.events) == 3:
                raise ValueError("reader went away")

    with engine(Setup()) as it:
        sink = Broken()
        it.submit(Request("a", (1, 2, 3), replace(LONG, max_tokens=400)), sink)
        good = ask(it, "good", [4], LONG)
        assert good.tokens() == expected([4], LONG)
        again = ask(it, "b", [1, 2, 3], LONG)
        assert again.tokens() == expected([1, 2, 3], LONG)
        assert len(sink.events) == 3
        assert it.stats().requests_aborted == 1


def test_a_bug_of_ours_stops_the_engine_loudly() -> None:
    with engine(Setup()) as it:
        real = it._scheduler.schedule
        it._scheduler.schedule = lambda: 1 / 0  # type: ignore[assignment,return-value,method-assign]
        last = ask(it, "a", [1], LONG).last()
        assert last.finish_reason == "error"
        assert last.error is not None
        assert "ZeroDivisionError" in last.error
        it.close()
        with pytest.raises(EngineFailure, match="ZeroDivisionError"):
            ask(it, "b", [1], LONG)
        it._scheduler.schedule = real  # type: ignore[method-assign]
        it._scheduler.abort(0)


# ---- limits and refusals


def test_a_full_queue_is_refused() -> None:
    gate = Gate()
    with engine(Setup(max_running=1, max_waiting=2, ops=ToyOps(before=gate))) as it:
        first = ask(it, "0", [1], LONG)
        assert gate.entered.wait(TIMEOUT_S)
        sinks = [ask(it, str(i), [1], LONG) for i in (1, 2)]
        with pytest.raises(Overloaded, match="2 choices wait already and at most 2"):
            ask(it, "3", [1], LONG)
        gate.opened.set()
        for sink in (first, *sinks):
            assert sink.tokens() == expected([1], LONG)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], LONG, "no tokens"),
        ([1, VOCAB], LONG, f"token id {VOCAB} is not in the vocabulary"),
        ([1, -1], LONG, "token id -1"),
        ([1], replace(LONG, stop_token_ids=(99,)), "stop_token_ids names token 99"),
        ([1], replace(LONG, logit_bias=((77, 1.0),)), "logit_bias names token 77"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], params: SamplingParams, message: str) -> None:
    with engine(Setup()) as it, pytest.raises(InvalidRequest, match=message):
        ask(it, "a", prompt, params)


def test_too_long_is_refused_with_numbers() -> None:
    with engine(Setup(max_context=100)) as it:
        with pytest.raises(ContextTooLong, match="100 tokens and 1 to generate make 101"):
            ask(it, "a", [1] * 100, replace(LONG, max_tokens=None))
        with pytest.raises(ContextTooLong, match="61 tokens and 40 to generate make 101"):
            ask(it, "b", [1] * 61, LONG)
        assert len(ask(it, "c", [1] * 60, LONG).tokens()) == 40


def test_a_request_id_in_use_is_refused() -> None:
    gate = Gate()
    with engine(Setup(ops=ToyOps(before=gate))) as it:
        first = ask(it, "a", [1], LONG)
        with pytest.raises(InvalidRequest, match="'a' is in use"):
            ask(it, "a", [1], LONG)
        gate.opened.set()
        first.wait()
        assert ask(it, "a", [1], LONG).tokens() == expected([1], LONG)


# ---- closing


def test_close_ends_open_requests_and_refuses_new_ones() -> None:
    ops, entered = ToyOps(), threading.Event()
    with engine(Setup(max_running=1, ops=ops)) as it:

        def wait_for_close(sequences: list[list[int]]) -> None:
            entered.set()
            with it._wake:
                assert it._wake.wait_for(lambda: it._is_closing, TIMEOUT_S)

        ops.before = wait_for_close
        running, waiting = ask(it, "a", [1], LONG), ask(it, "b", [2], LONG)
        assert entered.wait(TIMEOUT_S)
        it.close()
        for sink in (running, waiting):
            last = sink.last()
            assert last.finish_reason == "error"
            assert last.error == "the engine stopped: it was closed"
        with pytest.raises(EngineFailure, match="closed"):
            ask(it, "c", [1], LONG)


def test_close_from_a_sink_and_twice() -> None:
    with engine(Setup()) as it:
        sink = AbortAt(2)
        sink.abort = it.close
        it.submit(Request("a", (1,), LONG), sink)
        assert sink.last().finish_reason == "error"
        it.close()


FORK = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from toy import Setup, ask, engine
from headrace.errors import EngineFailure
from headrace.types import SamplingParams

held, done = threading.Event(), threading.Event()

def hold(it):
    with it._wake:
        held.set()
        done.wait()

with engine(Setup()) as it:
    holder = threading.Thread(target=hold, args=(it,))
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # hung
        it.abort("a")
        try:
            ask(it, "a", [1], SamplingParams(max_tokens=1))
        except EngineFailure as error:
            it.close()
            os._exit(7 if "fork" in error.message else 8)
        os._exit(9)
    done.set()
    holder.join()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(ask(it, "b", [1]).tokens()) > 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_refuses_instead_of_hanging() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(Path(__file__).parent)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "7 True\n"


def test_an_idle_engine_sleeps() -> None:
    ops = ToyOps()
    with engine(Setup(ops=ops)) as it:
        ask(it, "a", [1], LONG).wait()
        steps = ops.num_steps
        assert steps == 40
        ask(it, "b", [1], LONG).wait()
        assert ops.num_steps == steps + 40
