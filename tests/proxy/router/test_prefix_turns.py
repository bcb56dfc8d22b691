"""A prompt waits while another one computes their common beginning."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support.requests import ask, upstream

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.cache.prompt import read_prompt
from proxy.request.request import ProxyRequest
from proxy.router.lease import Completion, Lease
from proxy.router.queue import BeginningCase, beginning_wait_s
from proxy.router.router import Router
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Timings

STORY = "a long story of a river and a stone " * 100
FIRST, ALIKE, OTHER = ask(STORY + "one"), ask(STORY + "two"), ask("b" * 4000)


def router(slots: int = 2, cache_key: str = "key") -> Router:
    found = Router()
    found.admit(replace(upstream("a", slots=slots), cache_key=cache_key))
    return found


async def held(found: Router, first: ProxyRequest, second: ProxyRequest) -> bool:
    """Return whether the second request waits beside a free slot until the first is over."""
    async with asyncio.TaskGroup() as group, found.lease(first) as lease:
        task = group.create_task(_answered(found, second))
        for _ in range(20):  # nothing here waits for I/O
            await asyncio.sleep(0)
        is_held = bool(found.queues.positions())
        assert is_held is not task.done()
        found.finish(lease, Completion(Timings(0, 1000, 2000.0, 4, 40.0)))
    return is_held


async def _answered(found: Router, request: ProxyRequest) -> None:
    async with found.lease(request) as lease:
        found.finish(lease)


async def test_a_prompt_that_begins_alike_waits_for_the_first() -> None:
    assert await held(router(), FIRST, ALIKE)


async def test_another_prompt_does_not() -> None:
    assert not await held(router(), FIRST, OTHER)


async def test_an_engine_without_files_computes_both() -> None:
    assert not await held(router(cache_key=""), FIRST, ALIKE)


async def test_nobody_waits_for_an_answer_that_takes_longer_than_computing() -> None:
    found = router()
    async with found.lease(OTHER) as lease:
        found.finish(lease, Completion(Timings(0, 1000, 2000.0, 4000, 400_000.0)))
    assert not await held(found, FIRST, ALIKE)


# Another instance computes a beginning of 2 000 tokens at 1 000 tokens/s.
CASE = BeginningCase(left=2000, there_tps=1000, tokens=2000, here_tps=1000, transfer_s=0.1)


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        pytest.param({}, 2.1, id="both begin at once: a little later, for half of the work"),
        pytest.param({"left": 500.0}, 0.6, id="most of it is computed"),
        pytest.param({"left": 0.0}, 0.1, id="all of it is computed"),
        pytest.param({"there_tps": 700.0}, 0, id="the other instance is slower"),
        pytest.param({"here_tps": 1500.0}, 0, id="this instance is faster"),
        pytest.param({"here_tps": 1500.0, "backlog": 1000.0}, 2.1, id="but it has other prompts"),
        pytest.param({"transfer_s": 0.6}, 0, id="its file is too large to save and to restore"),
        pytest.param({"transfer_s": 0.6, "left": 1000.0}, 1.6, id="half of it is computed"),
        pytest.param({"tokens": 100.0}, 0, id="this instance has nearly all of it"),
        pytest.param({"left": 1000.0, "waited_s": 2.0}, 0.6, id="it ends the wait that it began"),
        pytest.param({"left": 1000.0, "waited_s": 2.6}, 0, id="it waited as long as computing"),
        pytest.param({"timeout_s": 3.0}, 1.5, id="half of its own timeout"),
        pytest.param({"timeout_s": 3.0, "waited_s": 1.5}, 0, id="half of its own timeout is over"),
        pytest.param({"left": math.inf}, 0, id="the other instance does not go on"),
    ],
)
def test_a_wait_for_a_beginning_is_compared_with_computing_it(
    changes: dict[str, float], wait_s: float
) -> None:
    assert beginning_wait_s(replace(CASE, **changes)) == pytest.approx(wait_s)


def begin(question: str, system: str = STORY) -> ProxyRequest:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    members = {"model": "chat", "messages": messages}
    prompt = read_prompt(EndpointKind.CHAT, "chat", members)
    return replace(ask(question), json=members, prompt=prompt)


def pair(**changes: Any) -> Router:
    found = Router()
    for name in ("a", "b"):
        shown: dict[str, Any] = {
            "cache_key": "key",
            "can_name_slots": True,
            "token_bytes": 1000.0,
            **changes,
        }
        found.admit(replace(upstream(name, slots=2, key=""), **shown))
    return found


async def settled() -> None:
    for _ in range(20):  # nothing here waits for I/O
        await asyncio.sleep(0)


class Waiting:
    """A request that waits for the beginning that the lease of another one computes."""

    def __init__(self, found: Router, request: ProxyRequest) -> None:
        self._router = found
        self._request = request
        self._leases: list[Lease] = []

    @property
    def is_waiting(self) -> bool:
        return not self._leases

    async def run(self) -> Lease:
        async with self._router.lease(self._request) as lease:
            self._leases.append(lease)
            self._router.finish(lease)
        return lease


def saved(lease: Lease) -> SlotFile:
    assert lease.request.prompt
    blocks = lease.request.prompt.blocks[: lease.beginning_blocks]
    return SlotFile("file", "key", 16 * len(blocks), 1000, ConversationFingerprint((), blocks))


async def test_a_beginning_that_another_instance_computes_is_awaited_until_its_file_is_there() -> (
    None
):
    found = pair()
    async with asyncio.TaskGroup() as group, found.lease(begin("one")) as first:
        assert first.beginning_blocks > 50
        second, other = Waiting(found, begin("two")), Waiting(found, begin("one", "b" * 4000))
        tasks = [group.create_task(waiting.run()) for waiting in (second, other)]
        await settled()
        assert second.is_waiting
        assert not other.is_waiting  # it shares nothing, and takes a free slot
        found.note_beginning(first, is_saved=True)
        await settled()
        assert second.is_waiting  # its file is being stored
        found.add_slot_file(saved(first))
        assert (await tasks[0]).beginning_blocks == 0
        found.finish(first)


async def test_sub_agents_wait_for_the_beginning_and_the_tools_that_they_share() -> None:
    def sub_agent(question: str) -> ProxyRequest:
        tools = [{"type": "function", "function": {"name": "look", "description": STORY}}]
        request = begin(question, "You are an agent.")
        members = {**request.json, "tools": tools}
        prompt = read_prompt(EndpointKind.CHAT, "chat", members)
        return replace(request, json=members, prompt=prompt)

    found = pair()
    async with asyncio.TaskGroup() as group, found.lease(sub_agent("one")) as first:
        assert first.beginning_blocks > 50
        second = Waiting(found, sub_agent("two"))
        task = group.create_task(second.run())
        await settled()
        assert second.is_waiting
        found.note_beginning(first, is_saved=True)
        found.add_slot_file(saved(first))
        assert (await task).beginning_blocks == 0
        found.finish(first)


async def test_a_beginning_that_is_not_saved_is_computed_on_the_other_instance() -> None:
    found = pair()
    async with asyncio.TaskGroup() as group, found.lease(begin("one")) as first:
        second = Waiting(found, begin("two"))
        task = group.create_task(second.run())
        await settled()
        found.note_beginning(first, is_saved=False)
        lease = await task
        assert lease.upstream.name != first.upstream.name
        assert lease.beginning_blocks  # now it computes it for others
        found.finish(first)


async def test_a_request_that_fails_frees_those_that_wait_for_its_beginning() -> None:
    found = pair()
    async with asyncio.TaskGroup() as group:
        second = Waiting(found, begin("two"))
        with suppress(ConnectionError):
            async with found.lease(begin("one")):
                task = group.create_task(second.run())
                await settled()
                assert second.is_waiting
                raise ConnectionError
        await task


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"cache_key": ""}, id="slots are not saved"),
        pytest.param({"can_name_slots": False}, id="slots have no numbers"),
        pytest.param({"window_tokens": 1024}, id="it is shorter than the window"),
        pytest.param({"prefer_pure_decode": True}, id="prompts are computed in chunks"),
        pytest.param({"token_bytes": 1e9}, id="its file is too large"),
    ],
)
async def test_a_beginning_is_not_saved_where_that_is_useless(changes: dict[str, Any]) -> None:
    found = pair(**changes)
    async with found.lease(begin("one")) as first:
        assert first.beginning_blocks == 0
        found.finish(first)


async def test_of_a_state_only_the_same_beginning_is_awaited() -> None:
    found = pair(resumable_prompts=2)
    async with asyncio.TaskGroup() as group, found.lease(begin("one", STORY + "Monday")) as first:
        assert first.beginning_blocks > 50
        same = Waiting(found, begin("two", STORY + "Monday"))
        other = Waiting(found, begin("two", STORY + "Tuesday"))
        for waiting in (same, other):
            group.create_task(waiting.run())
        await settled()
        assert same.is_waiting
        assert not other.is_waiting  # it could use nothing of it
        found.note_beginning(first, is_saved=False)
        found.finish(first)


async def test_a_state_is_saved_for_other_slots_of_its_engine_too() -> None:
    found = Router()
    alone = replace(upstream("a", slots=2, key=""), cache_key="key", token_bytes=1000.0)
    found.admit(replace(alone, can_name_slots=True, resumable_prompts=2))
    async with found.lease(begin("one")) as first:
        assert first.beginning_blocks > 50
        found.finish(first)


async def test_a_beginning_is_saved_for_other_instances_only() -> None:
    found = router()
    async with found.lease(begin("one")) as first:
        assert first.beginning_blocks == 0
        found.finish(first)
