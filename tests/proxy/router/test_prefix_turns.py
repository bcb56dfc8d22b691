"""A prompt waits while another one computes what both begin with."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from support.requests import ask, upstream

from proxy.request.request import ProxyRequest
from proxy.router.lease import Completion
from proxy.router.router import Router
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
