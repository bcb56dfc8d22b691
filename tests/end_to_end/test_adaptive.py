"""Slots that follow demand, on the real engine, with limits of a second."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import tiny_gguf
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.fleet_harness import LONG

SETTINGS = """
[models.chat]
path = "{path}"
[models.chat.slots]
queued_s = 0.5
quiet_s = {quiet_s}
max = 8
"""
TOKENS = 60
# The model says the alphabet, from anywhere on: a lost or doubled token shows.
SAID = string.ascii_lowercase * (TOKENS // 26 + 2)


@pytest.fixture(scope="session")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.make(tmp_path_factory.mktemp("models") / "alphabet.gguf", mode="cycle")


@pytest.fixture(autouse=True)
def is_adaptive(corral: CorralCli) -> None:
    corral.env["CORRAL_SUPERVISOR__ADAPTIVE"] = "true"


def slots(corral: CorralCli) -> int:
    (model,) = corral.status().models
    return model.slots


async def ask(http: aiohttp.ClientSession, client: int) -> dict[str, Any]:
    body = {
        "model": "chat",
        "max_tokens": TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": f"client {client} {LONG}"}],
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


@asynccontextmanager
async def clients(url: str, count: int) -> AsyncIterator[list[dict[str, Any]]]:
    """Send requests, each client one after another, while the block runs; yield the answers."""
    answers: list[dict[str, Any]] = []
    is_over = asyncio.Event()

    async def go_on(http: aiohttp.ClientSession, client: int) -> None:
        while not is_over.is_set():
            answers.append(await ask(http, client))

    timeout = aiohttp.ClientTimeout(PATIENCE_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as http, asyncio.TaskGroup() as group:
        for client in range(count):
            group.create_task(go_on(http, client))
        yield answers
        is_over.set()


async def take_turns(url: str) -> None:
    """Have each of eight clients ask once more, so that the order of the slots' use is certain."""
    async with aiohttp.ClientSession(url) as http:
        for client in range(8):
            await ask(http, client)


async def cached_tokens(url: str) -> list[int]:
    """Have four more clients ask at the same time; return the cached tokens of each prompt."""
    async with aiohttp.ClientSession(url) as http, asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(http, client)) for client in range(8, 12)]
    usages = [task.result()["usage"] for task in asking]
    return [int(usage["prompt_tokens_details"]["cached_tokens"]) for usage in usages]


def adapted(corral: CorralCli) -> list[tuple[object, object]]:
    events = corral.events("model.adapted")
    # Other tests load the machine, which may change the threads.
    return [(event["before"], event["after"]) for event in events if event["key"] == "parallel"]


def test_slots_grow_while_requests_queue_and_shrink_when_it_is_quiet(
    corral: CorralCli, alphabet: Path
) -> None:
    corral.configure(SETTINGS.format(path=alphabet, quiet_s=240))
    assert corral.data("plan", "chat")["most_slots"] == 8
    assert "up to 8 slots while requests queue" in corral.ok("plan", "chat")
    corral.ok("start")
    assert slots(corral) == 4

    async def load() -> list[dict[str, Any]]:
        async with clients(corral.url, 8) as answers:
            await asyncio.to_thread(until, lambda: slots(corral) == 8)
            at_growth = len(answers)
            await asyncio.to_thread(until, lambda: len(answers) >= at_growth + 16)
        return answers

    answers = asyncio.run(load())
    asyncio.run(take_turns(corral.url))
    assert max(asyncio.run(cached_tokens(corral.url))) < 100
    text = corral.ok("status")
    assert "chat: parallel = 8 now: requests queued for 0.5 s with 4 slots" in text
    assert corral.status().models[0].ctx_size == 8 * 2048
    for answer in answers:
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == TOKENS
        assert choice["message"]["content"] in SAID

    corral.configure(SETTINGS.format(path=alphabet, quiet_s=2))
    corral.ok("reload")
    until(lambda: slots(corral) == 4)
    assert "parallel" not in corral.ok("status")
    assert adapted(corral) == [(4, 8), (8, 4)]
    until(lambda: len(corral.engines()) == 1)
    # As many conversations as there are slots came along, the latest.
    assert min(asyncio.run(cached_tokens(corral.url))) > 600
