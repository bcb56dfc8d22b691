"""Many instances: each choice is the one that a comparison of all of them makes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.cache.index import CacheHint, PrefixIndex
from proxy.request.request import ProxyRequest
from proxy.router.candidates import Candidates, LeaseTimes
from proxy.router.lease import Completion, Lease, RoutingTarget
from proxy.router.policy import Weight
from proxy.router.registry import InstanceSets
from proxy.router.router import Router
from proxy.settings import Policy, ProxySettings
from proxy.upstream.upstream import Node, Rates, Timings

PROMPT = ask("tell me of the sea " * 200)
POLICIES: tuple[Policy, ...] = ("affinity", "least-busy", "round-robin")


class Compared(Candidates):
    """Compares all instances for each choice."""

    def _instances_for(
        self, request: ProxyRequest, avoid: Collection[str], *_: object, **__: object
    ) -> tuple[list[RoutingTarget], float | None]:
        return self._all_for(request, avoid), None


@dataclass(frozen=True)
class Drawn:
    """One instance."""

    slots: int
    in_use: int
    turn: float
    prefill_tps: float
    weight: float
    owned: int
    cached: int
    is_node: bool
    is_spare: bool
    on_trial: bool


drawn = st.builds(
    Drawn,
    slots=st.integers(1, 3),
    in_use=st.sampled_from([0, 1, 3, 3]),
    turn=st.sampled_from([0.0, 1.0, 2.5]),
    prefill_tps=st.sampled_from([100.0, 100.0, 900.0]),
    weight=st.sampled_from([1.0, 1.0, 1.0, 0.25, 2.5]),
    owned=st.sampled_from([0, 0, 1, 2, 7]),
    cached=st.sampled_from([0, 63, 64, 100, 127, 800, 800]),
    is_node=st.booleans(),
    is_spare=st.booleans(),
    on_trial=st.sampled_from([False, False, True]),
)
asked = st.tuples(
    st.integers(0, 4),  # the owner
    st.sampled_from([0.0, 0.5, 100.0]),  # has waited
    st.sampled_from([(), (), ("0",), ("1", "2")]),  # to be avoided
    st.sampled_from([(), (), (), ("0", "3")]),  # held
    st.sampled_from([1, 1, 1, 1, 2]),  # slots
    st.booleans(),  # from another proxy
)


def instance(number: int, entry: Drawn) -> RoutingTarget:
    node = Node("n", "chat", is_spare=entry.is_spare) if entry.is_node else None
    trial_share = 0.5 if entry.on_trial else 0.0
    made = RoutingTarget(
        replace(upstream(f"{number}", entry.slots), node=node, trial_share=trial_share),
        Rates(prefill_tps=entry.prefill_tps),
        turn=entry.turn,
        bit=1 << number,
    )
    made.hold([Lease(PROMPT, made, float) for _ in range(min(entry.in_use, entry.slots))])
    return made


def together(facts: list[tuple[int, int]]) -> dict[int, int]:
    """Return the sets of those with the same number above 0."""
    found: dict[int, int] = {}
    for value, bit in facts:
        if value:
            found[value] = found.get(value, 0) | bit
    return found


@settings(max_examples=400)
@given(
    st.lists(drawn, min_size=1, max_size=7),
    st.lists(asked, min_size=1, max_size=4),
    st.sampled_from(POLICIES),
    st.lists(st.integers(0, 6), max_size=5),
)
def test_each_choice_is_that_of_a_comparison(
    facts: list[Drawn], requests: list[tuple[object, ...]], policy: Policy, ends: list[int]
) -> None:
    instances = [instance(number, fact) for number, fact in enumerate(facts)]
    owners = together([(fact.owned, 1 << at) for at, fact in enumerate(facts)])
    cached = together([(fact.cached, 1 << at) for at, fact in enumerate(facts)])
    weights = {f"{at}": Weight(fact.weight) for at, fact in enumerate(facts)}
    times = LeaseTimes()
    times.decode_s = 1.0
    sets = InstanceSets(instances, weights, few=1)
    for at in ends:  # they change meanwhile
        if at < len(instances) and (one := instances[at]).leases:
            one.drop(one.leases[0])
            one.set_turn(3.0 + at)
            one.set_rates(Rates(prefill_tps=500.0))
            sets.update([one])
    trial_share = max(instance.upstream.trial_share for instance in instances)
    plain = Compared(sets, owners, policy, times, trial_share)
    many = Candidates(sets, owners, policy, times, trial_share)
    for owner, waited_s, avoid, held, slots, is_from_proxy in requests:
        request: ProxyRequest = replace(PROMPT, slots=slots, is_from_proxy=is_from_proxy)  # type: ignore[arg-type]
        hint = CacheHint(f"{owner}", sorted(cached.items(), reverse=True))
        rest = (avoid, hint, waited_s, held)
        assert many.choice(request, *rest) == plain.choice(request, *rest)  # type: ignore[arg-type]


def test_of_those_that_would_answer_at_once_the_next_in_turn_gets_a_conversation_that_moves() -> (
    None
):
    free = Drawn(1, 0, 2.0, 900.0, 1.0, 0, 0, is_node=False, is_spare=False, on_trial=False)
    drawn_ones = [free, replace(free, turn=1.0), replace(free, in_use=1, cached=800)]
    instances = [instance(number, entry) for number, entry in enumerate(drawn_ones)]
    sets = InstanceSets(instances, {f"{at}": Weight() for at in range(3)}, few=1)
    many = Candidates(sets, {}, "affinity", LeaseTimes(), 0.0)
    assert many.choice(PROMPT, (), CacheHint("2", [(800, 4)]), waited_s=100.0).name == "1"


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
