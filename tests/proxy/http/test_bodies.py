"""How much memory all bodies may take together."""

import asyncio
import threading
from contextlib import ExitStack

import pytest

from proxy.errors import BodyMemoryFull
from proxy.http.body import Bodies
from proxy.settings import ProxySettings

SETTINGS = ProxySettings(body_memory_bytes=10_000_000)


def test_one_more_than_all_may_take_is_refused_until_another_ends() -> None:
    bodies = Bodies(SETTINGS)
    with ExitStack() as stack:
        first, second = (stack.enter_context(bodies.share(name)) for name in "ab")
        first.add_bytes(1_500_000)
        with pytest.raises(BodyMemoryFull, match="body_memory_bytes") as refused:
            second.add_bytes(1_000_000)
        assert refused.value.headers()["Retry-After"]
        assert second.held_bytes == 0
        second.add_bytes(0, values=1000)
    assert bodies.held_bytes == 0
    with bodies.share("a") as third:
        third.add_bytes(1_500_000)


def test_a_body_that_is_alone_is_bounded_by_its_own_limits_only() -> None:
    bodies = Bodies(SETTINGS)
    with bodies.share("a") as share:
        share.add_bytes(9_000_000)
        share.add_bytes(9_000_000)
        with bodies.share("b") as other, pytest.raises(BodyMemoryFull):
            other.add_bytes(1)


def test_one_client_leaves_half_of_it_to_others() -> None:
    bodies = Bodies(SETTINGS)
    with bodies.share("a") as first, bodies.share("a") as second, bodies.share("b") as other:
        first.add_bytes(900_000)
        with pytest.raises(BodyMemoryFull, match="one client"):
            second.add_bytes(200_000)
        second.add_bytes(50_000)
        other.add_bytes(900_000)
    assert bodies.held_bytes == 0


async def test_a_large_body_is_parsed_beside_the_loop_and_a_small_one_on_it() -> None:
    bodies = Bodies(SETTINGS)
    here = threading.get_ident()
    with bodies.share("a") as share:
        assert await share.run(1000, threading.get_ident) == here
        assert await share.run(1_000_000, threading.get_ident) != here
    bodies.close()


async def test_one_large_body_is_parsed_at_a_time() -> None:
    bodies = Bodies(SETTINGS)
    begun, may_end = threading.Semaphore(0), threading.Event()

    def work() -> None:
        begun.release()
        may_end.wait(60)

    with bodies.share("a") as share:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(share.run(1_000_000, work))
            assert await asyncio.to_thread(begun.acquire, timeout=60)
            assert not await asyncio.to_thread(begun.acquire, timeout=0.1)
            may_end.set()
    bodies.close()
