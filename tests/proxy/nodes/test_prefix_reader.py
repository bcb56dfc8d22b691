"""A turn goes to the machine that has its conversation, also where another front sent it there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.node import NodesProxy, configured_node
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from proxy.auth.access import PREFIXES
from proxy.common.headers import HOP
from proxy.nodes.monitor import prefixes_pause_s

ANSWER = "It is as wide as you want it to be."
FRONT_LIMIT = 3  # for chats; requests of a front are not counted
KEYS = f"""
[keys.front]
key = "front-key"
requests_per_minute = {FRONT_LIMIT}
[keys.guest]
key = "guest-key"
"""


async def say_answer(call: Call) -> None:
    """Answer a chat as an engine does, as a stream."""
    await call.begin_stream()
    for delta, more in (
        ({"content": ANSWER}, {}),
        ({}, {"timings": {"cache_n": 90, "prompt_n": 10, "predicted_n": 9}}),
    ):
        finish = None if delta else "stop"
        event = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
        await call.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


class Machines:
    """Two machines with an engine each, and fronts before them."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.machines: dict[str, ProxyHarness] = {}

    async def start(self, **settings: Any) -> None:
        for name in ("one", "two"):
            (self._directory / name).mkdir()
            machine = ProxyHarness(self._directory / name, self._stack)
            await machine.open(**settings)
            await machine.fake(say_answer)
            self.machines[name] = machine

    async def front(self, api_key: str = "") -> NodesProxy:
        """Start a front; return once it has read the prefixes of the machines."""
        nodes = [
            configured_node(name, machine.server.url, api_key=api_key, models=("chat",))
            for name, machine in self.machines.items()
        ]
        front = NodesProxy(*nodes)
        await self._stack.enter_async_context(front.running())
        await until(lambda: front.states() == [True, True])
        return front


@pytest.fixture
async def machines(socket_directory: Path) -> AsyncIterator[Machines]:
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        yield Machines(socket_directory, stack)


class Chat:
    """A conversation that any front may continue."""

    def __init__(self, subject: str) -> None:
        self._subject = f"{subject} " * 200
        self._messages: list[dict[str, str]] = []

    async def turn(self, front: NodesProxy) -> str:
        """Send the next turn; return the node that answered."""
        self._messages.append({"role": "user", "content": self._subject})
        body = {"model": "chat", "messages": self._messages}
        async with front.http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            message = (await response.json())["choices"][0]["message"]
        self._messages.append({"role": "assistant", "content": message["content"]})
        return response.headers["X-Corral-Instance"].partition("/")[0]


async def test_another_front_finds_each_conversation(machines: Machines) -> None:
    await machines.start()
    first, second = await machines.front(), await machines.front()
    chats = [Chat(subject) for subject in ("sea", "sky", "stone", "star")]
    begun = [await chat.turn(first) for chat in chats]
    assert sorted(begun) == ["one", "one", "two", "two"]
    await told(second, 8)
    assert [await chat.turn(second) for chat in chats] == begun
    await told(first, 16)
    assert [await chat.turn(first) for chat in reversed(chats)] == begun[::-1]
    later = await machines.front()  # as after a restart: told before its first request
    assert [await chat.turn(later) for chat in chats] == begun


async def told(front: NodesProxy, count: int) -> None:
    """Wait until a front was told of so many ends of turns."""
    await until(lambda: len(front.router.cache.remote.holders) >= count)


async def test_a_client_gets_only_its_own_conversations(machines: Machines, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    await machines.start(api_keys_file=keys)
    front, guest = await machines.front("front-key"), await machines.front("guest-key")
    await Chat("sea").turn(front)
    await told(await machines.front("front-key"), 2)
    await Chat("sky").turn(guest)
    await told(guest, 2)
    assert len(guest.router.cache.remote.holders) == 2
    for machine in machines.machines.values():
        async with machine.http.get(PREFIXES) as response:
            assert response.status == 401
        asked = {"X-Api-Key": "front-key", HOP: "1"}
        for path in (PREFIXES, "/v1/models"):
            for _ in range(FRONT_LIMIT + 1):
                async with machine.http.get(path, headers=asked) as response:
                    assert response.status == 200
        async with machine.http.post(PREFIXES, headers={"X-Api-Key": "guest-key"}) as response:
            assert response.status == 405


async def test_what_a_node_that_is_gone_held_is_forgotten(machines: Machines) -> None:
    await machines.start()
    first, second = await machines.front(), await machines.front()
    where = await Chat("sea").turn(first)
    await told(second, 2)
    await machines.machines[where].server.close()
    second.look_again()
    await until(lambda: len(second.router.cache.remote.holders) == 0)


@pytest.mark.parametrize(
    ("unchanged", "nodes", "wait_s"),
    [(0, 1, 0.5), (59, 3, 0.5), (60, 1, 5), (10**6, 3, 5), (0, 1000, 10)],
)
def test_a_node_with_news_is_asked_soon_and_many_nodes_seldom(
    unchanged: int, nodes: int, wait_s: float
) -> None:
    assert prefixes_pause_s(unchanged, nodes) == wait_s
