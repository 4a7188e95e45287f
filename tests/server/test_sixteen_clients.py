"""Sixteen official clients on a real model: each gets the answer it would get alone.

Prompts and lengths are mixed, half are greedy and half seeded, some share a beginning; two clients
leave midway. Afterwards every page is free or only cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from serving import base_url, serving

from headrace.config import EngineConfig
from headrace.service import Service, load_service

NAME = "smollm2:135m"
NUM_CLIENTS = 16
LEAVERS = (5, 11)
SHARED = "You are asked short questions about rivers, mills and machines. Answer briefly. "
WORDS = ("water", "wheel", "stone", "grain", "mill", "dam", "gate", "race")
MAX_LOOKS = 500  # each look is an HTTP request; aborts take effect within a step


@dataclass(frozen=True)
class Talk:
    """What one client asks."""

    number: int

    @property
    def content(self) -> str:
        question = " ".join(WORDS[(self.number + i) % 8] for i in range(1 + 2 * self.number))
        return (SHARED if self.number % 3 == 0 else "") + f"{self.number}: {question}?"

    @property
    def max_tokens(self) -> int:
        return 200 if self.number in LEAVERS else 2 + (5 * self.number) % 7

    @property
    def temperature(self) -> float:
        return 0.9 * (self.number % 2)


@pytest.fixture(scope="module")
def service(model_path: Callable[[str], Path]) -> Iterator[Service]:
    config = EngineConfig(max_context=512, max_running=NUM_CLIENTS)
    loaded = load_service(NAME, model_path(NAME), config)
    yield loaded
    loaded.close()


async def ask(client: openai.AsyncOpenAI, talk: Talk) -> str | None:
    """The streamed answer; None from a client that leaves after three chunks."""
    chunks = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": talk.content}],
        max_tokens=talk.max_tokens,
        temperature=talk.temperature,
        seed=talk.number,
        stream=True,
        extra_body={"ignore_eos": talk.number in LEAVERS},
    )
    text = ""
    num_chunks = 0
    async with chunks:
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            num_chunks += 1
            if talk.number in LEAVERS and num_chunks == 3:
                return None
    return text


async def alone(client: openai.AsyncOpenAI, talk: Talk) -> str:
    """The same question with nobody else there, not streamed."""
    answer = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": talk.content}],
        max_tokens=talk.max_tokens,
        temperature=talk.temperature,
        seed=talk.number,
    )
    return answer.choices[0].message.content or ""


async def idle_health(url: str) -> dict[str, int]:
    """The engine's numbers once nothing runs."""
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), timeout=60) as client:
        for _ in range(MAX_LOOKS):
            numbers: dict[str, int] = (await client.get("/health")).json()["models"][NAME]
            if numbers["running"] == numbers["waiting"] == 0:
                return numbers
    raise AssertionError("requests are still running")


def test_sixteen_clients_get_their_own_answers(service: Service) -> None:
    talks = [Talk(number) for number in range(NUM_CLIENTS)]

    async def run(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, talk) for talk in talks))
            numbers = await idle_health(url)
            assert numbers["kv_free_pages"] + numbers["kv_cached_pages"] == numbers["kv_pages"]
            for talk, answer in zip(talks, together, strict=True):
                if talk.number in LEAVERS:
                    assert answer is None
                else:
                    assert answer == await alone(client, talk), talk

    with serving({NAME: service}) as address:
        asyncio.run(run(base_url(address)))
    # (A health probe that saw others make progress was aborted too.)
    assert service.stats().requests_aborted >= len(LEAVERS)
