"""Many instances: choices are the same, and cost as much as among few."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.cache.index import CacheHint, PrefixIndex
from proxy.router.candidates import Candidates
from proxy.router.lease import Completion, Lease, LeaseTimes, RoutingTarget, Weight
from proxy.router.registry import InstanceSets
from proxy.router.router import Router
from proxy.settings import Policy, ProxySettings
from proxy.upstream.upstream import Rates, Timings

PROMPT = ask("tell me of the sea " * 200)
POLICIES: tuple[Policy, ...] = ("affinity", "least-busy", "round-robin")


def test_of_those_that_would_answer_at_once_the_next_in_turn_gets_a_conversation_that_moves() -> (
    None
):
    turns_and_use = [(2.0, 0), (1.0, 0), (1.0, 1)]
    instances = [
        RoutingTarget(
            upstream(f"{number}", 1), Rates(prefill_tps=900.0), turn=turn, bit=1 << number
        )
        for number, (turn, _) in enumerate(turns_and_use)
    ]
    for made, (_, in_use) in zip(instances, turns_and_use, strict=True):
        made.hold([Lease(PROMPT, made, float) for _ in range(in_use)])
    sets = InstanceSets(instances, {f"{at}": Weight() for at in range(3)}, few=1)
    many = Candidates(sets, {}, "affinity", LeaseTimes(), 0.0)
    chosen, _ = many.choice(PROMPT, (), CacheHint("2", [(800, 4)]), waited_s=100.0)
    assert chosen is instances[1]


drawn = st.builds(
    RoutingTarget,
    st.sampled_from([upstream(name) for name in "abcdefg"]),
    st.builds(Rates, prefill_tps=st.sampled_from([100.0, 100.0, 900.0])),
    turn=st.sampled_from([0.0, 1.0, 2.5]),
)


@given(
    st.lists(drawn, min_size=2, max_size=7, unique_by=lambda instance: instance.upstream.name),
    st.sampled_from(POLICIES),
    st.integers(0, 6),
    st.lists(st.integers(0, 6), max_size=5),
)
def test_orders_that_are_kept_give_the_choice_of_a_comparison(
    instances: list[RoutingTarget], policy: Policy, owner: int, changed: list[int]
) -> None:
    for number, made in enumerate(instances):
        made.bit = 1 << number
    weights = {made.upstream.name: Weight() for made in instances}
    kept, compared = (InstanceSets(instances, weights, few=few) for few in (1, 16))
    for number in changed:
        made = instances[number % len(instances)]
        made.set_turn(3.0 + number)
        made.set_rates(Rates(prefill_tps=500.0 + number))
        made.hold([Lease(PROMPT, made, float)] if made.has_free_slot else [])
    home = instances[owner % len(instances)]
    hint = CacheHint(home.upstream.name, [(800, home.bit)])
    choices = []
    for sets in (kept, compared):
        sets.update(instances)
        candidates = Candidates(sets, {}, policy, LeaseTimes(), 0.0)
        choices.append(candidates.choice(PROMPT, (), hint, 0.0))
    assert choices[0] == choices[1]


async def test_forty_instances_share_and_keep_conversations() -> None:
    router = Router(ProxySettings())
    for number in range(40):
        router.admit(upstream(f"{number}", slots=2))
    owners: dict[int, str] = {}
    reply = {"role": "assistant", "content": "It is."}
    for turn in range(3):
        for number in range(80):
            story = f"{number} " + "tell me of the sea " * 20
            texts = [story, *["It is.", "go on"] * turn]
            async with router.lease(ask(*texts)) as lease:
                assert owners.setdefault(number, lease.upstream.name) == lease.upstream.name
                router.finish(lease, Completion(Timings(0, 90, 100.0, 8, 100.0), reply))
    assert set(Counter(owners.values()).values()) == {2}


async def test_of_many_a_slow_one_gets_less() -> None:
    now_s = [0.0]
    router = Router(ProxySettings(policy="least-busy"), clock=lambda: now_s[0])
    for number in range(20):
        router.admit(upstream(f"{number}"))
    names: Counter[str] = Counter()
    for number in range(200):
        now_s[0] += 0.1
        async with router.lease(ask(f"{number}")) as lease:
            names[lease.upstream.name] += 1
            decode_ms = 8000.0 if lease.upstream.name == "7" else 1000.0
            router.finish(lease, Completion(Timings(0, 20, 20.0, 100, decode_ms)))
    assert names["7"] <= 4
    assert {names[f"{number}"] for number in range(20) if number != 7} <= {10, 11}


def test_of_many_that_wait_for_their_owners_each_gets_its_slot_at_once() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        router = Router(ProxySettings(), clock=clock)
        for number in range(20):
            router.admit(upstream(f"{number}"))
        reply = {"role": "assistant", "content": "It is."}
        owners: list[str] = []
        stories = [f"{number} " + "tell me of the sea " * 200 for number in range(20)]
        for story in stories:
            async with router.lease(ask(story)) as lease:
                owners.append(lease.upstream.name)
                router.finish(lease, Completion(None, reply))
        router.admit(upstream("free"))
        got: dict[int, str] = {}

        async def go_on(number: int) -> None:
            texts = [stories[number], "It is.", "go on", "It is.", "and then?"]
            async with router.lease(ask(*texts)) as lease:
                got[number] = lease.upstream.name
                router.finish(lease)

        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            turns = [ask(story, "It is.", "go on") for story in stories]
            held = [await stack.enter_async_context(router.lease(turn)) for turn in turns]
            for number in range(20):
                group.create_task(go_on(number))
            await asyncio.sleep(0.1)
            assert router.queues.stats()["chat"].interactive == 20
            router.finish(held[7])
            await asyncio.sleep(0.001)
            assert got == {7: owners[7]}
            await asyncio.sleep(60)
            assert set(got.values()) == {owners[7], "free"}  # it was worth no longer wait
            assert len(got) == 20

    run_in_virtual_time(main())


@pytest.mark.parametrize(("instances", "choices"), [(4, 2), (20, 0)])
def test_among_many_instances_a_request_waits_for_its_owner_without_new_choices(
    monkeypatch: pytest.MonkeyPatch, instances: int, choices: int
) -> None:
    async def main() -> None:
        router = Router(ProxySettings(), clock=asyncio.get_running_loop().time)
        for number in range(instances):
            router.admit(upstream(f"{number}"))
        reply = {"role": "assistant", "content": "It is."}
        stories = [f"{number} " + "tell me of the sea " * 200 for number in range(instances)]
        for story in stories:
            async with router.lease(ask(story)) as lease:
                router.finish(lease, Completion(None, reply))
        router.admit(upstream("free"))
        looked_up: list[object] = []
        look_up = PrefixIndex.look_up

        async def go_on(number: int) -> None:
            async with router.lease(ask(stories[number], "It is.", "go on", "It is.", "and?")):
                pass

        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            turns = [ask(story, "It is.", "go on") for story in stories]
            held = [await stack.enter_async_context(router.lease(turn)) for turn in turns]
            waiting = [group.create_task(go_on(number)) for number in range(2)]
            await asyncio.sleep(0.1)
            assert router.queues.stats()["chat"].interactive == 2

            def counted(index: PrefixIndex, *args: object) -> object:
                looked_up.append(args)
                return look_up(index, *args)  # type: ignore[arg-type]  # passed on as they are

            with monkeypatch.context() as patch:
                patch.setattr(PrefixIndex, "look_up", counted)
                router.finish(held[3])  # of another conversation, on another instance
            assert len(looked_up) == choices
            for task in waiting:
                task.cancel()

    run_in_virtual_time(main())
