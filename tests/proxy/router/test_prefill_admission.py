"""Prompts begin one at a time where running streams come first, and none waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.router.lease import FEW_TOKENS, Lease
from proxy.router.queue import (
    WAIT_MAX_S,
    QueuedRequest,
    RequestQueue,
    prefill_wait_s,
    shortest_first,
)
from proxy.router.router import Router
from proxy.settings import ProxySettings

BUSY = (1, 4)  # prefilling, decoding


@pytest.mark.parametrize(
    ("work", "new_tokens", "expected_s"),
    [
        (BUSY, 2000, 10.0),
        ((0, 4), 2000, 0.0),
        ((3, 0), 2000, 0.0),
        (BUSY, FEW_TOKENS, 0.0),
        (BUSY, FEW_TOKENS + 1, 10.0),
    ],
)
def test_one_prompt_at_a_time_while_others_decode(
    work: tuple[int, int], new_tokens: int, expected_s: float
) -> None:
    """seed 001: BatchConfig.prefer_pure_decode."""
    assert prefill_wait_s(*work, new_tokens, waited_s=0.0, timeout_s=120.0) == expected_s


def test_the_wait_is_bounded() -> None:
    assert prefill_wait_s(*BUSY, 2000, waited_s=4.0, timeout_s=120.0) == WAIT_MAX_S - 4
    assert prefill_wait_s(*BUSY, 2000, waited_s=WAIT_MAX_S, timeout_s=120.0) == 0.0
    assert prefill_wait_s(*BUSY, 2000, waited_s=1.0, timeout_s=6.0) == 2.0


def entries(*waiting: tuple[str, str]) -> list[QueuedRequest]:
    """Return requests in the order of the queue; each is a client and its priority."""
    queue = RequestQueue("chat", ProxySettings())
    for client, priority in waiting:
        of_batch = priority == "batch"
        request = ask("hello", client=client, priority="batch" if of_batch else "interactive")
        queue.join(QueuedRequest(request, 0.0))
    return list(queue.order(0.0))


def test_the_shortest_prompt_is_first() -> None:
    waiting = entries(("a", ""), ("b", ""), ("c", ""))
    tokens = {
        entry.request.client: size for entry, size in zip(waiting, (2000, 100, 600), strict=True)
    }
    found = shortest_first(waiting, lambda waiter: tokens[waiter.request.client])
    assert [waiter.request.client for waiter in found] == ["b", "c", "a"]


def test_priorities_keep_their_turns() -> None:
    waiting = entries(("a", ""), ("b", "batch"), ("c", ""))
    tokens = {"a": 2000, "b": 10, "c": 100}
    found = shortest_first(waiting, lambda waiter: tokens[waiter.request.client])
    assert [entry.request.client for entry in found] == ["c", "a", "b"]


@given(st.lists(st.integers(0, 3000), max_size=30))
def test_each_client_overtakes_a_prompt_four_times_at_most(sizes: list[int]) -> None:
    waiting = entries(("long", ""), *(("others", "") for _ in sizes))
    tokens = dict(zip(map(id, waiting), (3000, *sizes), strict=False))
    found = shortest_first(waiting, lambda waiter: tokens[id(waiter)])
    assert sorted(map(id, found)) == sorted(map(id, waiting))
    assert [entry.request.client for entry in found].index("long") <= 4


# In the queue.

LONG = "all of this has to be computed " * 40


def router_of(slots: int = 4, *, queue_max: int = 128) -> Router:
    settings = ProxySettings(queue_max=queue_max, policy="least-busy")
    router = Router(settings, clock=asyncio.get_running_loop().time)
    router.admit(replace(upstream("pure", slots), prefer_pure_decode=True))
    return router


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Held:
    """Requests that hold a slot until the test ends."""

    def __init__(self, router: Router, group: asyncio.TaskGroup, stack: AsyncExitStack) -> None:
        self._router = router
        self._group = group
        self._stack = stack
        self.names: list[str] = []

    async def decoding(self) -> Lease:
        lease = await self._stack.enter_async_context(self._router.lease(ask("hello")))
        lease.progress.count_token()
        return lease

    def begin(self, name: str, text: str) -> asyncio.Task[Lease]:
        async def hold() -> Lease:
            found = await self._stack.enter_async_context(self._router.lease(ask(text)))
            self.names.append(name)
            return found

        return self._group.create_task(hold())


def in_queue(test: Callable[[Held, Router], Awaitable[None]], **facts: int) -> None:
    async def main() -> None:
        router = router_of(**facts)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            await test(Held(router, group, stack), router)

    run_in_virtual_time(main())


def test_a_second_prompt_waits_for_the_first_token_of_the_first() -> None:
    """seed 001: BatchConfig.prefer_pure_decode."""

    async def main(held: Held, router: Router) -> None:
        await held.decoding()
        first = held.begin("first", "1 " + LONG)
        held.begin("second", "2 " + LONG)
        await settle()
        assert held.names == ["first"]
        assert router.demand("chat").held_back == router.demand("chat").waiting == 1
        first.result().progress.count_token()
        await settle()
        assert held.names == ["first", "second"]
        assert router.demand("chat").held_back == 0

    in_queue(main)


def test_a_prompt_of_few_new_tokens_begins_at_once() -> None:
    async def main(held: Held, _: Router) -> None:
        await held.decoding()
        held.begin("first", "1 " + LONG)
        held.begin("short", "a question")
        held.begin("cached", "1 " + LONG)
        await settle()
        assert held.names == ["first", "short", "cached"]

    in_queue(main)


def test_the_shortest_of_those_that_wait_is_next() -> None:
    async def main(held: Held, _: Router) -> None:
        await held.decoding()
        first = held.begin("first", "1 " + LONG)
        held.begin("longest", "2 " + 3 * LONG)
        held.begin("shorter", "3 " + LONG)
        await settle()
        first.result().progress.count_token()
        await settle()
        assert held.names == ["first", "shorter"]

    in_queue(main)


def test_no_prompt_waits_longer_than_the_bound() -> None:
    async def main(held: Held, _: Router) -> None:
        await held.decoding()
        held.begin("first", "1 " + LONG)
        held.begin("second", "2 " + LONG)
        await asyncio.sleep(WAIT_MAX_S - 0.1)
        assert held.names == ["first"]
        await asyncio.sleep(0.2)
        assert held.names == ["first", "second"]

    in_queue(main)


def test_without_a_running_stream_no_prompt_waits() -> None:
    async def main(held: Held, _: Router) -> None:
        held.begin("first", "1 " + LONG)
        held.begin("second", "2 " + LONG)
        await settle()
        assert held.names == ["first", "second"]

    in_queue(main)


def test_a_request_that_may_not_wait_begins() -> None:
    """A full queue refuses none for which a slot is free."""

    async def main(held: Held, _: Router) -> None:
        await held.decoding()
        held.begin("first", "1 " + LONG)
        held.begin("second", "2 " + LONG)
        await settle()
        assert held.names == ["first", "second"]

    in_queue(main, queue_max=0)


def test_another_replica_takes_a_prompt_that_would_wait() -> None:
    async def main(held: Held, router: Router) -> None:
        await held.decoding()
        held.begin("first", "1 " + LONG)
        await settle()
        router.admit(upstream("other", slots=1))
        second = held.begin("second", "2 " + LONG)
        third = held.begin("third", "3 " + LONG)
        await settle()
        assert second.result().upstream.name == "other"
        assert not third.done()

    # By load, the second would go to the first instance: two of its hundred slots are in use.
    in_queue(main, slots=100)


def test_a_withdrawn_instance_holds_nothing_back() -> None:
    async def main(held: Held, router: Router) -> None:
        await held.decoding()
        held.begin("first", "1 " + LONG)
        second = held.begin("second", "2 " + LONG)
        await settle()
        router.withdraw("pure")
        router.admit(upstream("other", slots=1))
        await settle()
        assert second.result().upstream.name == "other"

    in_queue(main)
