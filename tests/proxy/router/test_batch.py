"""Batch requests fill idle slots of all replicas and nodes, and leave them to interactive ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.request.request import Priority, ProxyRequest
from proxy.router.router import Router
from proxy.settings import Policy, ProxySettings
from proxy.upstream.upstream import Node, Upstream

TWO_REPLICAS_AND_A_NODE = (
    upstream("chat.0", slots=2),
    upstream("chat.1", slots=2),
    replace(upstream("nas/chat", slots=2), node=Node("nas", "chat")),
)


@dataclass
class Load:
    """Requests that each hold a slot for so many seconds of virtual time."""

    router: Router
    group: asyncio.TaskGroup
    waits: list[tuple[Priority, float]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def send(self, request: ProxyRequest, holds_s: float) -> asyncio.Task[None]:
        task = self.group.create_task(self._hold(request, holds_s))
        self.tasks.append(task)
        return task

    def batch(self, count: int, holds_s: float = 10.0) -> None:
        for number in range(count):
            prompt = f"prompt {number}"
            request = ask(prompt, client="batch", priority="batch", queue_timeout_s=5000)
            self.send(request, holds_s)

    def interactive(self, holds_s: float = 10.0) -> asyncio.Task[None]:
        return self.send(ask("hello", client="ann"), holds_s)

    def in_use(self) -> dict[str, int]:
        return {
            instance.upstream.name: len(instance.leases) for instance in self.router.instances()
        }

    async def _hold(self, request: ProxyRequest, holds_s: float) -> None:
        async with self.router.lease(request) as lease:
            self.waits.append((request.priority, lease.queued_s))
            await asyncio.sleep(holds_s)
            self.router.finish(lease)


def play(
    story: Callable[[Load], Awaitable[None]], *upstreams: Upstream, policy: Policy = "affinity"
) -> Load:
    """Run a story to the end of its requests."""
    loads: list[Load] = []

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        settings = ProxySettings(policy=policy, queue_max=500, queue_timeout_s=5000)
        router = Router(settings, clock=clock)
        for target in upstreams or TWO_REPLICAS_AND_A_NODE:
            router.admit(target)
        async with asyncio.TaskGroup() as group:
            loads.append(load := Load(router, group))
            await story(load)
            await asyncio.wait(load.tasks)

    run_in_virtual_time(main())
    return loads[0]


policies = pytest.mark.parametrize("policy", ["affinity", "least-busy", "round-robin"])


@policies
def test_batch_requests_fill_every_slot_and_an_interactive_one_gets_the_next(
    policy: Policy,
) -> None:
    async def story(load: Load) -> None:
        load.batch(40)
        await asyncio.sleep(3)
        assert load.in_use() == {"chat.0": 2, "chat.1": 2, "nas/chat": 2}
        load.interactive()

    found = play(story, policy=policy)
    assert found.waits[6] == ("interactive", 7.0)
    assert len(found.waits) == 41


@policies
def test_while_interactive_requests_come_a_slot_is_left_to_the_next(policy: Policy) -> None:
    async def story(load: Load) -> None:
        load.interactive(1.0)
        await asyncio.sleep(2)
        load.batch(40)
        await asyncio.sleep(1)
        for _ in range(10):
            in_use = load.in_use()
            assert in_use.pop("nas/chat") == 2
            assert sum(in_use.values()) == 3
            await load.interactive(3.0)
            await asyncio.sleep(0.5)

    found = play(story, policy=policy)
    assert {wait_s for priority, wait_s in found.waits if priority == "interactive"} == {0.0}
    assert len(found.waits) == 51


def test_the_last_slot_is_taken_once_none_came_for_half_a_minute() -> None:
    async def story(load: Load) -> None:
        await load.interactive(1.0)
        load.batch(40, 100.0)
        await asyncio.sleep(29.5)
        assert sum(load.in_use().values()) == 5
        await asyncio.sleep(1)
        assert sum(load.in_use().values()) == 6

    play(story)


def test_an_only_slot_is_not_left_free() -> None:
    async def story(load: Load) -> None:
        await load.interactive(1.0)
        load.batch(2)
        await asyncio.sleep(0.1)
        assert load.in_use() == {"chat": 1}

    play(story, upstream("chat", slots=1))


def test_a_batch_request_that_needs_all_slots_gets_them() -> None:
    async def story(load: Load) -> None:
        await load.interactive(1.0)
        load.send(replace(ask("two", priority="batch"), slots=2), 5.0)
        await asyncio.sleep(0.1)
        assert load.in_use() == {"chat": 2}

    play(story, upstream("chat", slots=2))


def test_interactive_requests_without_end_leave_a_batch_request_its_turn() -> None:
    async def story(load: Load) -> None:
        for _ in range(2):
            load.interactive(1.0)
        load.batch(1)
        for number in range(30):
            load.send(ask("again", client=f"client {number}"), 1.0)

    found = play(story, upstream("chat", slots=2))
    at = [priority for priority, _ in found.waits].index("batch")
    assert at == 2 + 8


def test_a_batch_request_that_leaves_while_a_slot_is_left_free_is_forgotten() -> None:
    async def story(load: Load) -> None:
        await load.interactive(1.0)
        load.batch(4)
        await asyncio.sleep(0.1)
        for task in load.tasks[1:]:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await load.tasks[-1]
        assert load.router.queues.stats()["chat"].batch == 0

    play(story)
