"""Requests between instances of unequal speed, as their responses measure it."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from support.requests import ask, upstream

from proxy.cache.index import CacheHint
from proxy.router.candidates import Candidates
from proxy.router.lease import Completion, Lease, LeaseTimes, RoutingTarget, Weight
from proxy.router.registry import InstanceSets
from proxy.router.router import Router
from proxy.settings import Policy, ProxySettings
from proxy.upstream.upstream import Node, Rates, Timings

# Of 100 tokens.
DECODE_MS = {"fast": 1000.0, "slow": 4000.0}


async def served(router: Router, count: int) -> Counter[str]:
    """Have new conversations answered one after another; return who answered how many."""
    names: Counter[str] = Counter()
    for number in range(count):
        async with router.lease(ask(f"{sum(names.values())} {number} {id(names)}")) as lease:
            name = lease.upstream.name
            names[name] += 1
            router.finish(lease, Completion(Timings(0, 20, 20.0, 100, DECODE_MS[name])))
    return names


def routing(policy: Policy = "affinity", *, route_by_speed: bool = True) -> Router:
    router = Router(ProxySettings(policy=policy, route_by_speed=route_by_speed))
    for name in ("slow", "fast"):
        router.admit(upstream(name, slots=4))
    return router


def weights(router: Router) -> dict[str, Weight]:
    return {instance.upstream.name: instance.weight for instance in router.instances()}


async def test_each_policy_shares_by_the_speed_that_responses_report() -> None:
    policies: tuple[Policy, ...] = ("affinity", "least-busy", "round-robin")
    for policy in policies:
        router = routing(policy)
        assert await served(router, 2) == {"fast": 1, "slow": 1}
        assert weights(router) == {
            "fast": Weight(1.6, "measured"),
            "slow": Weight(0.4, "measured"),
        }
        assert (await served(router, 20))["fast"] in {15, 16, 17}


async def test_speed_may_be_left_aside() -> None:
    router = routing(route_by_speed=False)
    assert await served(router, 20) == {"fast": 10, "slow": 10}
    assert {weight.reason for weight in weights(router).values()} == {"equal"}


async def test_a_slow_instance_keeps_a_share_and_is_equal_once_it_has_recovered() -> None:
    router = routing()
    await served(router, 20)
    DECODE_MS["slow"] = 1000.0
    try:
        assert (await served(router, 30))["slow"] >= 5
        assert {weight.reason for weight in weights(router).values()} == {"equal"}
    finally:
        DECODE_MS["slow"] = 4000.0


async def test_the_weight_of_a_node_is_set_or_measured() -> None:
    router = routing("round-robin")
    router.admit(replace(upstream("slow"), node=Node("nas", "chat", is_spare=False, weight=0.25)))
    assert weights(router)["slow"] == Weight(0.25, "set")
    assert await served(router, 20) == {"fast": 16, "slow": 4}


async def test_requests_beside_others_are_not_compared_with_requests_alone() -> None:
    router = routing()
    async with AsyncExitStack() as stack:
        held: dict[str, list[Lease]] = {"fast": [], "slow": []}
        for number in range(5):
            lease = await stack.enter_async_context(router.lease(ask(f"{number}")))
            held[lease.upstream.name].append(lease)
        assert {len(leases) for leases in held.values()} == {2, 3}
        for name, leases in held.items():
            router.finish(leases[-1], Completion(Timings(0, 20, 20.0, 100, DECODE_MS[name])))
    assert set(weights(router).values()) == {Weight()}


async def test_a_conversation_leaves_a_slow_instance_for_a_faster_one() -> None:
    router = routing()
    story = "tell me of the sea " * 20
    reply = {"role": "assistant", "content": "It is."}
    async with router.lease(ask(story)) as lease:
        assert lease.upstream.name == "slow"
        router.finish(lease, Completion(Timings(0, 20, 20.0, 100, DECODE_MS["slow"]), reply))
    await served(router, 6)
    async with router.lease(ask(story, "It is.", "go on")) as lease:
        assert lease.upstream.name == "fast"


@pytest.mark.parametrize(("weight", "name"), [(1.0, None), (0.25, "b")])
def test_a_slow_owner_is_expected_to_be_free_later(weight: float, name: str | None) -> None:
    request = ask("tell me of the sea " * 200)
    assert request.prompt
    owner, other = (RoutingTarget(upstream(name), Rates()) for name in "ab")
    owner.bit, other.bit = 1, 2
    owner.hold([Lease(request, owner, float)])
    weights = {"a": Weight(weight), "b": Weight(weight)}
    times = LeaseTimes()
    times.held_s = 10.0
    sets = InstanceSets([owner, other], weights)
    candidates = Candidates(sets, {}, "affinity", times, 0.0)
    hint = CacheHint("a", [(request.prompt.tokens, owner.bit)])
    chosen, _ = candidates.choice(request, (), hint, 0.0)
    assert (chosen and chosen.upstream.name) == name
