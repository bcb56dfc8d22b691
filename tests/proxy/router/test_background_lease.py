"""A slot is lent for work of our own, and asked back when clients want it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.errors import UpstreamShutDown
from proxy.router.lease import SlotUse
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Upstream


async def idle(_: Upstream) -> list[SlotState]:
    return []


def harness(slots: int = 1) -> Router:
    """Return two instances of a model."""
    router = Router(ProxySettings(), clock=asyncio.get_running_loop().time, list_slots=idle)
    for name in ("a", "b"):
        router.admit(upstream(name, slots))
    return router


def taken(router: Router) -> list[str]:
    return [instance.upstream.name for instance in router.instances() if instance.leases]


@pytest.mark.parametrize("name", ["a", "b"])
async def test_it_is_a_slot_of_the_named_instance_until_the_end_of_the_block(name: str) -> None:
    router, uses = harness(), list[SlotUse]()
    router.signals.slots_freed.connect(lambda _, use: uses.append(use))
    async with router.background_lease(name, "(warming)") as is_wanted:
        assert taken(router) == [name]
        assert not is_wanted()
    assert taken(router) == []
    assert [(use.client, use.is_exact) for use in uses] == [("(warming)", False)]


async def test_a_client_that_is_served_beside_it_wants_the_instance() -> None:
    router = harness(slots=2)
    router.withdraw("b")
    async with router.background_lease("a", "(warming)") as is_wanted:
        async with router.lease(ask("hello")) as lease:
            assert is_wanted()
            router.finish(lease)
        assert not is_wanted()


def test_a_client_in_line_gets_the_slot_of_a_block_that_is_left() -> None:
    async def main() -> None:
        router = harness()
        router.withdraw("b")
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(router.run())
            await asyncio.sleep(0)
            with suppress(ZeroDivisionError):
                async with router.background_lease("a", "(warming)") as is_wanted:
                    client = group.create_task(waited_s(router))
                    await asyncio.sleep(0)
                    assert is_wanted()
                    raise ZeroDivisionError
            assert 0 < await client < 0.1
            tending.cancel()

    run_in_virtual_time(main())


async def waited_s(router: Router) -> float:
    async with router.lease(ask("hello")) as lease:
        return lease.queued_s


async def test_an_instance_that_is_to_leave_is_asked_back_and_not_lent() -> None:
    router = harness()
    async with router.background_lease("a", "(warming)") as is_wanted:
        router.withdraw("a")
        assert is_wanted()
    for name in ("a", "none"):
        with pytest.raises(UpstreamShutDown):
            async with router.background_lease(name, "(warming)"):
                pass


async def test_it_is_no_work_that_keeps_a_model_from_leaving() -> None:
    router = harness()
    before = router.demand("chat")
    async with router.background_lease("a", "(warming)"):
        assert router.demand("chat") == before
    assert router.demand("chat") == before


async def test_a_stop_ends_the_block() -> None:
    router = harness()
    with pytest.raises(UpstreamShutDown):
        await lent_until_stopped(router)
    assert taken(router) == []


async def lent_until_stopped(router: Router) -> None:
    async with router.background_lease("a", "(warming)"), asyncio.TaskGroup() as group:
        group.create_task(router.close("a"))
        await asyncio.get_running_loop().create_future()
