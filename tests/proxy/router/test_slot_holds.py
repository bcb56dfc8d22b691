"""The slot of an agent that has called tools is held for its next turn, as long as that pays."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support.requests import ask, upstream, with_tools
from support.virtual_time import run_in_virtual_time

from proxy.cache.prompt import called_tools
from proxy.cache.save_policy import PAUSE_ENDS_S, ToolPauses, best_hold, handover_s
from proxy.endpoints.slots import all_slots, totals_of
from proxy.errors import QueueFull, Unfinished
from proxy.observe.explanation import cache_sentence
from proxy.request.request import Priority
from proxy.router import slot_holds, slots
from proxy.router.lease import Completion, Lease, SlotYielded
from proxy.router.queue import RequestQueue, queue_entry
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Timings

CALL = {"function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
PLAIN = {"role": "assistant", "content": "done"}
STORY = "words " * 1000
# Three of four clients return within a second, the others never.
SHARES = [0.75 * min(1.0, end_s) for end_s in PAUSE_ENDS_S]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> tuple[()]:
        return ()

    monkeypatch.setattr(slots, "get_slots", nothing)
    monkeypatch.setattr(slots, "refresh_slots", nothing)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every request wait until holds are over."""
    monkeypatch.setattr(slot_holds, "hold_wait_s", lambda *_, **__: 1e6)


# The rule.


def test_a_slot_is_held_until_most_clients_have_returned() -> None:
    left_s, gain_s = best_hold(SHARES, 0, 20, 2)
    assert 0.9 < left_s < 1.1
    assert gain_s == pytest.approx(0.75 * 2 - 0.625, abs=0.1)  # less the time until they return


def test_a_hold_gains_less_once_most_clients_have_returned() -> None:
    gains = [best_hold(SHARES, idle_s, 20, 4)[1] for idle_s in (0.0, 0.8, 0.95)]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize(
    ("shares", "idle_s", "limit_s", "cost_s"),
    [
        pytest.param(SHARES, 0, 20, 0, id="nothing is lost: a cache has all of it"),
        pytest.param(SHARES, 0, 20, 0.3, id="to compute it takes less time than the idle slot"),
        pytest.param([0.0] * len(PAUSE_ENDS_S), 0, 20, 2, id="nobody returns"),
        pytest.param(SHARES, 1.6, 20, 2, id="who returns has returned"),
        pytest.param(SHARES, 0, 0, 2, id="nothing is to be held"),
        pytest.param(SHARES, 20, 20, 2, id="the longest hold is over"),
        pytest.param([1.0] * len(PAUSE_ENDS_S), 60, 300, 2, id="all have returned"),
        pytest.param(SHARES, 500, 300, 2, id="long ago"),
    ],
)
def test_a_slot_is_handed_over(
    shares: list[float], idle_s: float, limit_s: float, cost_s: float
) -> None:
    assert best_hold(shares, idle_s, limit_s, cost_s) == (0, 0)


@pytest.mark.parametrize("limit_s", [0.1, 0.5, 1.0, 30.0, 300.0])
@pytest.mark.parametrize("idle_s", [0.0, 0.05, 0.4, 29.0])
def test_no_hold_is_longer_than_its_limit(limit_s: float, idle_s: float) -> None:
    left_s, _ = best_hold(SHARES, idle_s, limit_s, 1e6)
    assert 0 <= left_s <= max(0.0, limit_s - idle_s) + 1e-9


def test_handing_over_costs_the_time_of_all_slots_of_the_engine() -> None:
    assert handover_s(2, slots=1) == 2
    assert handover_s(2, slots=4) == 8
    assert handover_s(0.4, slots=4) == 0  # it is computed at once
    assert handover_s(0, slots=4) == 0  # nothing is lost: only the order would change


def test_each_tool_of_each_client_has_its_own_pauses() -> None:
    pauses = ToolPauses()
    for _ in range(20):
        pauses.note("a", ["look"], 0.5)
        pauses.note("a", ["test"], 15.0)
    at = next(at for at, end_s in enumerate(PAUSE_ENDS_S) if end_s >= 1)
    assert pauses.shares("a", ["look"])[at] > 0.9
    assert pauses.shares("a", ["test"])[at] < 0.1
    assert 0.3 < pauses.shares("a", ["unknown"])[at] < 0.7  # as its other tools
    assert 0.3 < pauses.shares("b", ["look"])[at] < 0.7  # as other clients
    assert ToolPauses().shares("a", ["look"])[-1] < 1  # some never return


def test_pauses_are_remembered_of_a_bounded_number_of_tools() -> None:
    pauses = ToolPauses()
    for number in range(2000):
        pauses.note(f"client-{number}", ["look"], 0.5)
    assert len(pauses._counts) <= 512


@pytest.mark.parametrize(
    "reply",
    [
        CALLED,
        {"content": [{"type": "text", "text": "so"}, {"type": "tool_use", "name": "look"}]},
        {"content": [{"type": "reasoning"}, {"type": "function_call", "name": "look"}]},
    ],
    ids=["chat", "messages", "responses"],
)
def test_calls_are_found_in_the_answers_of_each_api(reply: dict[str, Any]) -> None:
    assert called_tools(reply) == ["look"]
    assert called_tools(PLAIN) == []


# The router.


def router(clients: int = 1, **settings: Any) -> Router:
    """Return a router of one engine that computes 500 tokens/s, with a slot for each client."""
    found = Router(
        ProxySettings(**{"slot_hold_max_s": 20, **settings}),
        clock=lambda: asyncio.get_running_loop().time(),
    )
    found.admit(replace(upstream("chat.1", slots=clients), can_name_slots=True))
    return found


class Turns:
    """The turns of one agent, whose prompt has about 1 500 tokens."""

    def __init__(
        self, found: Router, priority: Priority = "interactive", client: str = "agent"
    ) -> None:
        self._router = found
        self._priority: Priority = priority
        self._client = client
        self._texts = [f"{client} {STORY}"]

    async def ask(self, reply: dict[str, Any] = CALLED) -> Lease:
        request = with_tools(ask(*self._texts, client=self._client, priority=self._priority))
        async with self._router.lease(request) as lease:
            await asyncio.sleep(1)
            timings = Timings(0, 1500, 3000.0, 20, 400.0)
            self._router.finish(lease, Completion(timings, reply))
        self._texts += [reply["content"], "result"]
        return lease

    async def learn(self) -> None:
        """Return twenty times after half a second."""
        for _ in range(20):
            await self.ask()
            await asyncio.sleep(0.5)


async def stranger(
    found: Router,
    order: list[str],
    name: str = "stranger",
    priority: Priority = "interactive",
) -> Lease:
    """Ask a single question."""
    request = ask(f"{name} has a short question", client=name, priority=priority)
    async with found.lease(request) as lease:
        order.append(name)
        found.finish(lease, Completion(Timings(0, 10, 20.0, 20, 400.0), PLAIN))
    return lease


def counts(found: Router) -> Mapping[str, int]:
    return found.queues["chat"].holds.counts


def virtual(main: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(main)


@pytest.mark.usefixtures("patient")
def test_the_next_turn_keeps_its_slot_although_a_stranger_waits() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(stranger(found, order))
            await asyncio.sleep(0.5)
            assert order == []
            holds = found.queues["chat"].holds
            (instance,) = found.registry
            ((slot, left_s),) = holds.slots(instance).items()
            assert (slot, left_s > 0) == (0, True)
            assert holds.slots_by_name() == {"chat.1/0": left_s}
            (shown,) = all_slots(found.instances(), 0)
            assert (shown.state, shown.held_for_s) == ("held", round(left_s, 3))
            assert totals_of([shown]).num_held == totals_of([shown]).num_idle_slots == 1
            lease = await agent.ask(PLAIN)
            order.append("agent")
        assert order == ["agent", "stranger"]
        assert lease.held_s == pytest.approx(0.5)
        assert lease.finding
        assert lease.finding.held_ms == pytest.approx(500)
        assert "its slot was held for 0.5 s for this turn" in cache_sentence(lease.finding)
        assert waiting.result().hold_wait_s == pytest.approx(1.5)
        assert counts(found) == {"kept": 1}
        assert holds.held_s == pytest.approx(0.5)
        assert not holds.active

    virtual(main())


def test_an_answer_without_a_call_gives_the_slot_away() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        agent = Turns(found)
        await agent.learn()
        await agent.ask(PLAIN)
        await stranger(found, order)
        assert counts(found) == {}

    virtual(main())


@pytest.mark.usefixtures("patient")
def test_a_hold_ends_when_its_time_is_over() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        lease = await stranger(found, order)
        assert 0.5 <= lease.hold_wait_s < 5
        assert counts(found) == {"expired": 1}
        await asyncio.sleep(20)
        late = await agent.ask()
        assert late.held_s == 0

    virtual(main())


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("most_s", [0.25, 1.0])
def test_no_hold_is_longer_than_the_setting(most_s: float) -> None:
    async def main() -> None:
        found, order = router(slot_hold_max_s=most_s), list[str]()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        lease = await stranger(found, order)
        assert lease.hold_wait_s <= most_s + 0.01

    virtual(main())


def test_nothing_is_held_if_the_setting_is_0() -> None:
    async def main() -> None:
        found, order = router(slot_hold_max_s=0), list[str]()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        assert (await stranger(found, order)).hold_wait_s == 0
        assert not found.queues["chat"].holds.active

    virtual(main())


def test_without_waiting_requests_nothing_is_held() -> None:
    async def main() -> None:
        found = router()
        agent = Turns(found)
        await agent.learn()
        assert counts(found) == {}
        assert found.queues["chat"].holds.held_s == 0

    virtual(main())


def test_a_stranger_takes_another_free_slot_and_leaves_the_agents() -> None:
    async def main() -> None:
        found, order = router(clients=2), list[str]()
        agent = Turns(found)
        await agent.ask()
        first = await agent.ask()
        others = [await stranger(found, order, f"stranger {number}") for number in range(3)]
        assert all(other.hold_wait_s == 0 for other in others)
        assert first.slot
        assert {other.slot for other in others}.isdisjoint({first.slot})
        assert counts(found) == {}

    virtual(main())


@pytest.mark.usefixtures("patient")
def test_an_instance_that_leaves_service_ends_its_holds() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        async with asyncio.TaskGroup() as group:
            group.create_task(stranger(found, order))
            await asyncio.sleep(0.1)
            found.admit(upstream("chat.2"))
            found.withdraw("chat.1")
        assert order == ["stranger"]
        assert counts(found) == {"ended": 1}

    virtual(main())


def test_an_instance_out_of_service_holds_nothing() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        agent = Turns(found)
        await agent.learn()
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.ask())
            await asyncio.sleep(0.5)
            found.withdraw("chat.1")
        assert found.forget("chat.1")
        found.admit(upstream("chat.2"))
        assert (await stranger(found, order)).hold_wait_s == 0
        assert not found.queues["chat"].holds.active

    virtual(main())


def test_work_of_our_own_takes_no_held_slot_and_is_no_reason_to_hold() -> None:
    async def main() -> None:
        found = router()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.4), found.background_lease("chat.1", "(warming)"):
                pytest.fail("the slot is held")
        await asyncio.sleep(0.1)
        assert (await agent.ask()).held_s == 0
        assert counts(found) == {}

    virtual(main())


def test_a_request_of_higher_priority_gets_the_slot() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        agent = Turns(found, "batch")
        await agent.learn()
        await agent.ask()
        async with asyncio.TaskGroup() as group:
            group.create_task(stranger(found, order, "a batch", "batch"))
            await asyncio.sleep(0.1)
            lease = await stranger(found, order)
        assert order[0] == "stranger"
        assert lease.hold_wait_s == 0
        assert counts(found) == {"yielded": 1}

    virtual(main())


def test_agents_take_turns_after_some_handovers_have_been_saved() -> None:
    async def main() -> None:
        found = router()
        one, other = Turns(found), Turns(found, client="other")
        await one.learn()
        await other.ask()
        turns = 0
        async with asyncio.TaskGroup() as group:
            await one.ask()
            waiting = group.create_task(other.ask())
            while not waiting.done():
                await asyncio.sleep(0.5)
                await one.ask()
                turns += 1
        assert 5 <= turns <= 12  # the wait of five handovers of 3 s each
        assert waiting.result().hold_wait_s > 7

    virtual(main())


def test_clients_that_waited_come_first_once_a_slot_is_handed_over() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        agent = Turns(found)
        await agent.learn()
        async with asyncio.TaskGroup() as group:
            await agent.ask()
            for number in range(4):
                group.create_task(stranger(found, order, f"{number}"))
            for _ in range(12):
                await asyncio.sleep(0.5)
                await agent.ask()
        assert len(order) == 4

    virtual(main())


def test_the_expected_wait_takes_a_held_slot_for_taken() -> None:
    async def main() -> None:
        found = router()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        assert found.queues["chat"].stats().expected_wait_s > 0
        await asyncio.sleep(20)
        assert found.queues["chat"].stats().expected_wait_s == 0

    virtual(main())


def test_a_batch_request_yields_if_the_other_slot_is_held() -> None:
    async def batch(found: Router) -> None:
        request = replace(ask("long"), priority="batch", may_yield=True)
        with suppress(SlotYielded):
            async with found.lease(request) as lease:
                lease.let_yield(lambda: Unfinished("so far", 2, "x", 9))
                await asyncio.Event().wait()

    async def main() -> None:
        found, order = router(clients=2), list[str]()
        agent = Turns(found)
        await agent.learn()
        async with asyncio.TaskGroup() as group:
            group.create_task(batch(found))
            await asyncio.sleep(1)
            await agent.ask()
            lease = await stranger(found, order)
        assert lease.hold_wait_s < 0.1
        assert (await agent.ask()).has_own_slot

    virtual(main())


def test_a_full_queue_takes_the_slot_rather_than_refuse() -> None:
    async def main() -> None:
        found, order = router(queue_max=0), list[str]()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        try:
            await stranger(found, order)
        except QueueFull:
            pytest.fail("a slot was free")

    virtual(main())


def test_single_questions_alone_take_a_held_slot_at_once() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        agent = Turns(found)
        await agent.learn()
        await agent.ask()
        async with asyncio.TaskGroup() as group:
            single = [group.create_task(stranger(found, order, name)) for name in ("a", "b")]
        assert [task.result().hold_wait_s for task in single] == [0, 0]

    virtual(main())


def test_a_request_that_does_not_wait_ends_the_hold_that_gains_least() -> None:
    async def main() -> None:
        found, order = router(clients=2, queue_max=0), list[str]()
        agents = [Turns(found, client=client) for client in ("soon", "later")]
        for agent, pause_s in zip(agents, (0.4, 1.4), strict=True):
            for _ in range(20):
                await agent.ask()
                await asyncio.sleep(pause_s)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(agent.ask()) for agent in agents]
        soon = asked[0].result()
        holds = found.queues["chat"].holds
        (instance,) = found.registry
        assert len(holds.active[instance]) == 2
        await stranger(found, order)
        (left,) = holds.active[instance]
        assert left.conversation is soon.conversation

    virtual(main())


def test_a_single_question_takes_the_slot_whose_hold_gains_least_at_once() -> None:
    async def main() -> None:
        found, order = router(clients=2), list[str]()
        agents = [Turns(found, client=client) for client in ("late", "soon")]
        for agent, pause_s in zip(agents, (9.0, 0.5), strict=True):
            for _ in range(20):
                await agent.ask()
                await asyncio.sleep(pause_s)
        late, soon = [await agent.ask() for agent in agents]
        lease = await stranger(found, order)
        assert lease.hold_wait_s == 0
        assert lease.slot is late.slot is not soon.slot

    virtual(main())


@pytest.mark.parametrize(
    ("is_patient", "is_alone", "wait_s"),
    [
        pytest.param(False, True, 1, id="a question alone: for the requests before it"),
        pytest.param(False, False, 3, id="a question among others: half of the gain too"),
        pytest.param(True, True, 21, id="an agent's turn: five times the gain"),
        pytest.param(True, False, 21, id="an agent's turn among others"),
    ],
)
def test_a_request_waits_for_held_slots_by_their_gain(
    *, is_patient: bool, is_alone: bool, wait_s: float
) -> None:
    found = slot_holds.hold_wait_s(1, 4, 60, is_patient=is_patient, is_alone=is_alone)
    assert found == wait_s
    shortest = slot_holds.hold_wait_s(1, 4, 1, is_patient=is_patient, is_alone=is_alone)
    assert shortest == 0.5  # half of its timeout


def test_a_single_question_leaves_an_agent_its_slot_while_other_agents_wait() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        one, other = Turns(found), Turns(found, client="other")
        for _ in range(20):
            await one.ask()
            await asyncio.sleep(1.4)
        await other.ask()
        await one.ask()
        async with asyncio.TaskGroup() as group:
            group.create_task(other.ask())
            await asyncio.sleep(0)
            single = group.create_task(stranger(found, order))
            await asyncio.sleep(1.4)
            assert (await one.ask(PLAIN)).has_own_slot
        assert single.result().hold_wait_s > 1.4

    virtual(main())


def test_agents_that_wait_beside_a_request_are_counted() -> None:
    queue = RequestQueue("chat", ProxySettings())
    requests = ask("a"), with_tools(ask("b")), with_tools(ask("c"))
    question, agent, other = (queue_entry(request, (), 0.0) for request in requests)
    queue.join(question)
    queue.join(agent)
    assert queue.has_agents_beside(question)
    assert not queue.has_agents_beside(agent)
    queue.join(other)
    assert queue.has_agents_beside(agent)
    queue.leave(other)
    queue.take(agent)
    assert not queue.has_agents_beside(question)


def test_a_single_question_waits_for_the_requests_before_it_and_half_of_the_gain() -> None:
    async def main() -> None:
        found, order = router(), list[str]()
        one, other = Turns(found), Turns(found, client="other")
        await one.learn()
        await other.ask()
        await one.ask()
        held_s = found.queues["chat"].times.held_s
        async with asyncio.TaskGroup() as group:
            group.create_task(other.ask())
            await asyncio.sleep(0)
            single = group.create_task(stranger(found, order))
            while not single.done():
                await asyncio.sleep(0.3)
                await one.ask()
        gain_s = 1500 / 500
        assert 0 < single.result().hold_wait_s <= held_s + gain_s / 2 + 1.5

    virtual(main())
