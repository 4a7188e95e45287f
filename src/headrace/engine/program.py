"""Stage and Job: a request becomes a short list of stages, a job is a cursor through them. PURE.

A stage says which model component runs, how many units are wanted, what a unit costs and which
requests may share its forward. The cursor `done` chases `goal`; prefill and decode are the same
growing stage. Nothing here allocates or schedules (that is `scheduler.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.prefix import Node
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.types import Event, FinishReason, Request, SamplingParams, Usage

StageKey = tuple[str | int, ...]

TOKENS: StageKey = ("llm",)


@dataclass(frozen=True, slots=True)
class Stage:
    """One phase of a job.

    **Units** `goal` is what is known to be needed on entry (prompt tokens, denoise steps), `limit`
    the most it may ever reach; a unit costs `unit_cost` of the step's budget.
    """

    key: StageKey  # only equal keys share a forward
    goal: int
    limit: int
    unit_cost: int = 1
    is_whole: bool = False  # all remaining units in one step (bidirectional encoder)
    is_single: bool = False  # exactly one unit per step (denoise, VAE)
    is_paged: bool = False  # units live in KV pages
    is_growing: bool = False  # the update rule appends units (decode)


@dataclass(slots=True, eq=False)
class Job:
    """One choice of a request on its way; mutated by the scheduler only.

    Ids count up in order of arrival. `pages[:num_published]` are the tree path that ends in `node`;
    `num_sent` pages are known to the runner.
    """

    id: int
    request_id: str
    index: int
    params: SamplingParams
    seed: int
    stages: tuple[Stage, ...]
    tokens: list[int]
    num_prompt: int
    stage: Stage
    at: int = 0
    done: int = 0
    goal: int = 0
    pages: list[int] = field(default_factory=list)
    num_sent: int = 0
    num_published: int = 0
    node: Node | None = None
    num_cached: int = -1  # prompt tokens found in the cache at first admission; -1: not yet
    admission: int = 0  # serial of the last admission
    is_running: bool = False

    def event(
        self,
        reason: FinishReason | None,
        token_ids: tuple[int, ...] = (),
        error: str | None = None,
    ) -> Event:
        """A report without log-probabilities; the last one carries usage."""
        usage = None if reason is None else self.usage()
        return Event(self.request_id, self.index, token_ids, (), reason, usage, error)

    def usage(self) -> Usage:
        """Tokens so far."""
        num_completion = len(self.tokens) - self.num_prompt
        return Usage(self.num_prompt, num_completion, max(self.num_cached, 0))


def check_request(request: Request, vocab_size: int, max_context: int) -> int:
    """The most tokens one choice may reach (prompt and answer).

    **Raises** `InvalidRequest`, `ContextTooLong`: whatever could never run is refused here.
    """
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; give at least one", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(t for t in prompt if not 0 <= t < vocab_size)
        raise InvalidRequest(
            f"token id {bad} is not in the vocabulary; ids run from 0 to {vocab_size - 1}",
            param="prompt",
        )
    biased = (("logit_bias", t) for t, _ in params.logit_bias)
    stops = (("stop_token_ids", t) for t in params.stop_token_ids)
    for name, token in (*biased, *stops):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name} names token {token}; ids run from 0 to {vocab_size - 1}", param=name
            )
    return _limit(len(prompt), params, max_context)


def _limit(num_prompt: int, params: SamplingParams, max_context: int) -> int:
    wanted = params.max_tokens if params.max_tokens is not None else max(1, params.min_tokens)
    if num_prompt + wanted > max_context:
        what = f"prompt of {num_prompt} tokens and {wanted} to generate"
        raise ContextTooLong(
            f"{what} make {num_prompt + wanted}, the context holds {max_context}; "
            "shorten the prompt or ask for fewer tokens",
            param="max_tokens" if num_prompt < max_context else "prompt",
        )
    return max_context if params.max_tokens is None else num_prompt + params.max_tokens


def token_jobs(request: Request, first_id: int, seed: int, limit: int) -> list[Job]:
    """One job per choice, each a single growing paged stage; ids count up from `first_id`."""
    prompt = request.prompt_token_ids
    stage = Stage(TOKENS, len(prompt), limit, is_paged=True, is_growing=True)
    return [
        Job(
            id=first_id + index,
            request_id=request.id,
            index=index,
            params=request.params,
            seed=seed,
            stages=(stage,),
            tokens=list(prompt),
            num_prompt=len(prompt),
            stage=stage,
        )
        for index in range(request.params.n)
    ]
