"""Who is chosen, who is left alone, and how a wait for idleness ends."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from proxy.dispatch import Dispatch, Pulse
from proxy.errors import Unavailable, UpstreamStopped
from proxy.flight import flying
from proxy.upstream import Upstream


def upstream(name: str, model: str = "chat", slots: int = 1) -> Upstream:
    return Upstream(name, model, slots, f"/run/{name}.sock", "", 0, "key")


async def hold(stack: AsyncExitStack, dispatch: Dispatch, *avoid: str) -> str:
    lease = await stack.enter_async_context(dispatch.lease("chat", avoid))
    return lease.upstream.name


async def test_leases_go_where_the_fewest_are_for_each_slot() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("small", slots=1))
    dispatch.admit(upstream("large", slots=3))
    async with AsyncExitStack() as stack:
        names = [await hold(stack, dispatch) for _ in range(8)]
    assert Counter(names) == {"large": 6, "small": 2}


async def test_idle_instances_take_turns() -> None:
    dispatch = Dispatch()
    for name in ("a", "b", "c"):
        dispatch.admit(upstream(name))
    names = []
    for _ in range(6):
        async with AsyncExitStack() as stack:
            names.append(await hold(stack, dispatch))
    assert names == ["a", "b", "c", "a", "b", "c"]


async def test_one_to_avoid_is_taken_only_where_there_is_no_other() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    async with AsyncExitStack() as stack:
        assert await hold(stack, dispatch, "a") == "a"
        dispatch.admit(upstream("b"))
        assert [await hold(stack, dispatch, "a") for _ in range(2)] == ["b", "b"]


async def test_the_withdrawn_and_other_models_are_never_chosen() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    dispatch.admit(upstream("b", "other"))
    dispatch.withdraw("a")
    assert not dispatch.serves("chat")
    with pytest.raises(Unavailable, match="no instance of chat is ready"):
        async with AsyncExitStack() as stack:
            await hold(stack, dispatch)


async def test_the_withdrawn_keep_what_they_hold_until_it_is_over() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await hold(stack, dispatch)
        dispatch.withdraw("a")
        assert dispatch.busy("a") == 1
        waiting = group.create_task(dispatch.idle("a"))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert dispatch.busy("a") == 0


async def test_one_admitted_again_still_counts_what_it_holds() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    async with AsyncExitStack() as stack:
        await hold(stack, dispatch)
        dispatch.withdraw("a")
        dispatch.admit(upstream("a", slots=4))
        assert dispatch.busy("a") == 1
        assert dispatch.serves("chat")


async def test_closing_cuts_every_lease_and_returns_when_all_are_over() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    ends: list[str] = []

    async def be_cut() -> None:
        with pytest.raises(UpstreamStopped, match="a was stopped"):
            async with dispatch.lease("chat"):
                await asyncio.Event().wait()
        ends.append("cut")

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(be_cut())
        await asyncio.sleep(0)
        await dispatch.close("a")
        assert dispatch.busy("a") == 0
    assert ends == ["cut"] * 3


async def test_closing_twice_and_closing_the_unknown_are_nothing() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    await dispatch.close("a")
    await dispatch.close("a")
    await dispatch.idle("a")
    assert not dispatch._seats


async def test_a_pulse_tells_what_is_held_what_is_awaited_and_what_came() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a", slots=2))
    assert dispatch.pulse("a") == Pulse()
    async with dispatch.lease("chat") as first, dispatch.lease("chat"):
        assert dispatch.pulse("a") == Pulse(held=2, awaited=2)
        first.hear(b"data: {}\n\n")
        assert dispatch.pulse("a") == Pulse(held=2, awaited=1, bytes_heard=10)
        first.listen()
        assert dispatch.pulse("a").awaited == 2
    assert dispatch.pulse("a") == Pulse(bytes_heard=10)
    assert dispatch.pulse("unknown") == Pulse()


async def test_a_ping_is_no_sign_of_life() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    async with dispatch.lease("chat") as lease:
        lease.hear(b":\n\n:\n\n")
        assert dispatch.pulse("a").bytes_heard == 0


async def test_of_two_cuts_the_first_counts() -> None:
    async def be_cut_twice() -> None:
        async with flying() as flight:
            flight.cut(Unavailable("first"))
            flight.cut(Unavailable("second"))
            await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="first"):
        await be_cut_twice()


async def test_a_client_that_leaves_is_not_taken_for_a_cut() -> None:
    async def wait() -> None:
        async with flying():
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


async def test_a_timeout_of_the_blocks_own_is_not_taken_for_a_cut() -> None:
    with pytest.raises(TimeoutError):
        async with flying():
            raise TimeoutError


def test_an_upstream_keeps_its_key_out_of_its_repr() -> None:
    assert "key" not in repr(upstream("a")).replace("api_key", "")


def test_an_address_of_version_6_stands_in_brackets() -> None:
    url = Upstream("a", "chat", 1, None, "::1", 8081, "").url("/props", "")
    assert str(url) == "http://[::1]:8081/props"
