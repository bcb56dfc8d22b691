"""Estimates of instances that compute 1000 prompt tokens a second and hold a slot for 4 s."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from support.requests import ask, upstream

from proxy.request.request import ProxyRequest
from proxy.router import estimator
from proxy.router.estimator import Estimate, Estimator, LoadForecast
from proxy.router.lease import Completion, RoutingTarget
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Rates, Timings

HELD_S = 4.0
TEXT = "tell me of the sea " * 100


def serving(slots: int = 1, **tps: float) -> Router:
    """Return a router of instances, by name with their prompt tokens a second."""
    router = Router(ProxySettings(policy="least-busy"))
    for name, prefill_tps in tps.items():
        router.admit(upstream(name, slots=slots))
        if instance := router.registry.get(name):
            instance.set_rates(Rates(prefill_tps, answers=1))
    router.queues["chat"].times.held_s = HELD_S
    return router


def estimate(router: Router, request: ProxyRequest | None = None) -> Estimate:
    return Estimator(router).estimate(request or ask(TEXT))


async def take(stack: AsyncExitStack, router: Router, text: str = "hello", *avoid: str) -> str:
    """Take a slot with a computed prompt, and return the name of its instance."""
    lease = await stack.enter_async_context(router.lease(ask(text), avoid))
    lease.progress.count_token()
    return lease.upstream.name


def test_an_idle_instance_only_computes_the_prompt() -> None:
    found = estimate(serving(a=1000.0))
    assert (found.instance, found.queue_s, found.others) == ("a", 0.0, 0)
    assert found.first_token_s == found.new_tokens / 1000
    assert found.new_tokens == found.prompt_tokens > 300


def test_nothing_is_known_before_a_response_but_the_instance() -> None:
    router = Router()
    router.admit(upstream("a"))
    found = estimate(router)
    assert (found.instance, found.queue_s, found.first_token_s) == ("a", None, None)
    assert Estimator(Router()).estimate(ask(TEXT)).instance is None


async def test_a_new_instance_is_expected_to_be_as_fast_as_the_others() -> None:
    router = Router()
    router.admit(upstream("a"))
    async with router.lease(ask("hello")) as lease:
        router.finish(lease, Completion(Timings(0, 100, 50.0, 8, 100.0)))
    router.withdraw("a")
    assert estimate(router).instance is None
    router.admit(upstream("b"))
    found = estimate(router)
    assert found.first_token_s == found.new_tokens / 2000


async def test_cached_tokens_are_not_computed() -> None:
    router = serving(a=1000.0)
    async with router.lease(ask(TEXT)) as lease:
        router.finish(lease, Completion(Timings(0, 400, 400.0, 8, 100.0)))
    found = estimate(router, ask(TEXT, "It is.", "go on"))
    assert found.first_token_s == found.new_tokens / 1000
    assert found.new_tokens < found.prompt_tokens / 4


async def test_a_request_waits_for_a_slot_of_any_instance() -> None:
    router = serving(a=1000.0, b=1000.0)
    async with AsyncExitStack() as stack:
        taken = {await take(stack, router) for _ in range(2)}
        assert taken == {"a", "b"}
        found = estimate(router)
        assert (found.queue_s, found.others) == (HELD_S / 2, 2)
        assert found.first_token_s == pytest.approx(HELD_S / 2 + found.new_tokens / 1000)


async def test_those_before_it_get_their_slots_first() -> None:
    router = serving(a=1000.0)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        await take(stack, router)
        waiting = [group.create_task(take(stack, router)) for _ in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
        found = estimate(router)
        assert (found.queue_s, found.others) == (3 * HELD_S, 3)
        # Clients take turns.
        assert estimate(router, ask(TEXT, client="b")).queue_s == 2 * HELD_S
        for task in waiting:
            task.cancel()


async def test_prompts_that_an_instance_has_begun_go_first() -> None:
    router = serving(slots=2, a=1000.0)
    alone = estimate(router).first_token_s
    async with router.lease(ask("another text " * 100)) as lease:
        found = estimate(router)
        assert alone is not None
        assert found.queue_s == 0.0
        assert found.first_token_s == pytest.approx(alone + lease.backlog_tokens / 1000)


async def test_begun_prompts_are_computed_while_a_request_waits() -> None:
    router = serving(a=1000.0)
    for words, is_longer in ((100, False), (3000, True)):
        async with router.lease(ask("another text " * words)) as lease:
            found = estimate(router)
            assert found.queue_s == HELD_S
            begins_s = lease.backlog_tokens / 1000 if is_longer else HELD_S
            assert found.first_token_s == begins_s + found.new_tokens / 1000
            router.finish(lease)


async def test_the_faster_and_the_freer_instance_answers() -> None:
    router = serving(a=500.0, b=1000.0)
    assert estimate(router).instance == "b"
    async with AsyncExitStack() as stack:
        assert await take(stack, router, "hello", "a") == "b"
        found = estimate(router)
        assert (found.instance, found.queue_s) == ("a", 0.0)


class Forecaster:
    def load_forecast(self, _: str, /) -> LoadForecast:
        return LoadForecast(3.0, instances=2, slots=2)


def test_a_load_comes_before_the_prompt() -> None:
    router = serving()
    estimator = Estimator(router, Forecaster())
    assert estimator.estimate(ask(TEXT)).first_token_s is None
    router.queues["chat"].rates = Rates(1000.0, answers=1)
    found = estimator.estimate(ask(TEXT))
    assert (found.queue_s, found.is_loaded) == (0.0, False)
    assert found.first_token_s == 3.0 + found.new_tokens / 1000


def many(count: int) -> dict[str, float]:
    return {f"i{number}": 1000.0 for number in range(count)}


async def test_of_many_instances_the_one_with_the_prompt_or_the_fastest_is_found() -> None:
    router = serving(slots=2, **many(40), fast=3000.0)
    assert estimate(router).instance == "fast"
    fast, cached = router.registry.get("fast"), ask(TEXT, "It is.", "go on")
    assert fast
    async with router.lease(ask(TEXT), ("fast",)) as lease:
        owner = lease.upstream.name
        router.finish(lease, Completion(Timings(0, 400, 400.0, 8, 100.0)))
    assert estimate(router, cached).instance == owner
    async with AsyncExitStack() as stack:
        for _ in range(2):  # its slots, and a third request finds none
            await stack.enter_async_context(router.lease(ask(TEXT), tuple(many(40))))
        found = estimate(router, ask("another text " * 100))
        assert found.instance in many(40)
        assert (found.queue_s, found.others) == (0.0, 2)


@pytest.mark.parametrize("count", [40, 400])
async def test_an_estimate_among_many_compares_a_few(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    router, compared = serving(1, **many(count)), list[object]()
    async with AsyncExitStack() as stack:
        for number in range(count // 2):
            await take(stack, router, f"{number}")
        first_token_s = estimator._first_token_s

        def counted(queue_s: float, instance: RoutingTarget, *more: Any) -> float:
            compared.append(instance)
            return first_token_s(queue_s, instance, *more)

        monkeypatch.setattr(estimator, "_first_token_s", counted)
        assert estimate(router).others == count // 2
    assert len(compared) < 20
