"""A slot is lent for work of our own, and asked back when clients want it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from fakes.asks import ask, upstream
from fakes.clock import leap

from proxy.engine.upstream import Upstream
from proxy.errors import UpstreamStopped
from proxy.line.dispatch import Dispatch
from proxy.line.loan import loan
from proxy.settings import ProxySettings


async def idle(_: Upstream) -> int:
    return 0


def ranch(slots: int = 1) -> Dispatch:
    """Return two instances of a model."""
    dispatch = Dispatch(ProxySettings(), asyncio.get_running_loop().time, idle)
    for name in ("a", "b"):
        dispatch.admit(upstream(name, slots))
    return dispatch


def taken(dispatch: Dispatch) -> list[str]:
    return [seat.upstream.name for seat in dispatch.seats() if seat.leases]


@pytest.mark.parametrize("name", ["a", "b"])
async def test_it_is_a_slot_of_the_one_that_was_named_until_the_end_of_the_block(name: str) -> None:
    dispatch = ranch()
    async with loan(dispatch, name) as is_wanted:
        assert taken(dispatch) == [name]
        assert not is_wanted()
    assert taken(dispatch) == []


async def test_a_client_that_is_served_beside_it_wants_the_instance() -> None:
    dispatch = ranch(slots=2)
    dispatch.withdraw("b")
    async with loan(dispatch, "a") as is_wanted:
        async with dispatch.lease(ask("hello")) as lease:
            assert is_wanted()
            lease.complete()
        assert not is_wanted()


def test_a_client_in_line_gets_the_slot_of_a_block_that_is_left() -> None:
    async def main() -> None:
        dispatch = ranch()
        dispatch.withdraw("b")
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(dispatch.tend())
            await asyncio.sleep(0)
            with suppress(ZeroDivisionError):
                async with loan(dispatch, "a") as is_wanted:
                    client = group.create_task(waited_s(dispatch))
                    await asyncio.sleep(0)
                    assert is_wanted()
                    raise ZeroDivisionError
            assert 0 < await client < 0.1
            tending.cancel()

    leap(main())


async def waited_s(dispatch: Dispatch) -> float:
    async with dispatch.lease(ask("hello")) as lease:
        return lease.waited_s


async def test_an_instance_that_is_to_leave_is_asked_back_and_not_lent() -> None:
    dispatch = ranch()
    async with loan(dispatch, "a") as is_wanted:
        dispatch.withdraw("a")
        assert is_wanted()
    for name in ("a", "none"):
        with pytest.raises(UpstreamStopped):
            async with loan(dispatch, name):
                pass


async def test_it_is_no_work_that_keeps_a_model_from_leaving() -> None:
    dispatch = ranch()
    before = dispatch.demand("chat")
    async with loan(dispatch, "a"):
        assert dispatch.demand("chat") == before
    assert dispatch.demand("chat") == before


async def test_a_stop_ends_the_block() -> None:
    dispatch = ranch()
    with pytest.raises(UpstreamStopped):
        await lent_until_stopped(dispatch)
    assert taken(dispatch) == []


async def lent_until_stopped(dispatch: Dispatch) -> None:
    async with loan(dispatch, "a"), asyncio.TaskGroup() as group:
        group.create_task(dispatch.close("a"))
        await asyncio.get_running_loop().create_future()
