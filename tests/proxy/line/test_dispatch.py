"""Who gets a slot and who waits, who is left alone, and how every wait ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from fakes.asks import ask, upstream
from fakes.clock import leap

from proxy.engine.upstream import Upstream
from proxy.errors import LineFull, Loading, Unavailable, UpstreamStopped, WaitedLong
from proxy.line.dispatch import Dispatch
from proxy.line.flight import Flight, Flights
from proxy.line.rates import Timings
from proxy.line.seats import Pulse
from proxy.loader import ModelCard
from proxy.pages import Kind
from proxy.settings import ProxySettings

BUSY = ProxySettings(policy="least-busy")


async def hold(stack: AsyncExitStack, dispatch: Dispatch, *avoid: str) -> str:
    lease = await stack.enter_async_context(dispatch.lease(ask("hello"), avoid))
    return lease.upstream.name


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Loads:
    """A loader that does as it is told."""

    def __init__(self, load: Callable[[], Awaitable[None]]) -> None:
        self.load = load

    def models(self) -> list[ModelCard]:
        return []

    async def ensure_ready(self, _: str, /) -> None:
        await self.load()


# Who is chosen.


async def test_leases_go_where_the_fewest_are_for_each_slot() -> None:
    dispatch = Dispatch(BUSY)
    dispatch.admit(upstream("small", slots=2))
    dispatch.admit(upstream("large", slots=6))
    async with AsyncExitStack() as stack:
        names = [await hold(stack, dispatch) for _ in range(4)]
    assert Counter(names) == {"large": 3, "small": 1}


async def test_idle_instances_take_turns() -> None:
    dispatch = Dispatch(BUSY)
    for name in ("a", "b", "c"):
        dispatch.admit(upstream(name))
    names = []
    for _ in range(6):
        async with AsyncExitStack() as stack:
            names.append(await hold(stack, dispatch))
    assert names == ["a", "b", "c", "a", "b", "c"]


async def test_one_to_avoid_is_taken_only_where_there_is_no_other() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a", slots=2))
    async with AsyncExitStack() as stack:
        assert await hold(stack, dispatch, "a") == "a"
        dispatch.admit(upstream("b", slots=2))
        assert [await hold(stack, dispatch, "a") for _ in range(2)] == ["b", "b"]


async def test_the_withdrawn_and_other_models_are_never_chosen() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    dispatch.admit(upstream("b", model="other"))
    dispatch.withdraw("a")
    assert not dispatch.serves("chat")
    with pytest.raises(Unavailable, match="no instance of chat is ready"):
        async with AsyncExitStack() as stack:
            await hold(stack, dispatch)


async def test_the_next_turn_goes_home_and_is_expected_to_be_cached() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a", slots=2))
    dispatch.admit(upstream("b", slots=2))
    first = ask("tell me of the sea " * 20)
    async with dispatch.lease(first) as lease:
        home = lease.upstream.name
        lease.complete()
        lease.learn(Timings(0, 90, 100.0, 8, 100.0), {"role": "assistant", "content": "It is."})
    async with dispatch.lease(ask("another")) as lease:
        assert lease.upstream.name != home
        async with dispatch.lease(ask("tell me of the sea " * 20, "It is.", "go on")) as second:
            assert second.upstream.name == home
            assert second.expected_cached > 80
            second.learn(Timings(95, 10, 10.0, 8, 100.0), None)
    assert {facts.upstream.name: facts.homes for facts in dispatch.seats()} == {"a": 1, "b": 1}


# Who waits.


async def test_no_more_leases_are_held_than_there_are_slots() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a", slots=2))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await hold(stack, dispatch)
        async with AsyncExitStack() as inner:
            await hold(inner, dispatch)
            waiting = group.create_task(hold(stack, dispatch))
            await settle()
            assert not waiting.done()
            assert dispatch.pulse("a").held == 2
            assert dispatch.lines()["chat"].interactive == 1
        await settle()
        assert waiting.done()
        assert dispatch.lines()["chat"].interactive == 0


async def test_a_lease_that_is_complete_frees_its_slot_at_once() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    async with dispatch.lease(ask("one")) as first:
        first.complete()
        first.complete()
        async with dispatch.lease(ask("two")) as second:
            assert second.position == 0
            assert dispatch.pulse("a").held == 2
            assert len(dispatch.seats()[0].leases) == 1


async def test_one_more_than_may_wait_is_refused_at_once_and_told_when_to_come() -> None:
    dispatch = Dispatch(ProxySettings(line_max=0))
    dispatch.admit(upstream("a"))
    async with AsyncExitStack() as stack:
        await hold(stack, dispatch)
        with pytest.raises(LineFull, match="0 requests wait for chat") as refused:
            await hold(stack, dispatch)
    assert refused.value.headers() == {"Retry-After": "2"}


def test_who_waited_long_is_told_when_to_come_again() -> None:
    async def main() -> None:
        dispatch = Dispatch()
        dispatch.admit(upstream("a"))
        async with dispatch.lease(ask("one")):
            with pytest.raises(WaitedLong, match=r"no slot of chat came free in 3 s") as ended:
                async with dispatch.lease(ask("two", patience_s=3)):
                    pass
            assert int(ended.value.headers()["Retry-After"]) >= 1
            assert asyncio.get_running_loop().time() == 3
        assert dispatch.lines()["chat"].interactive == 0

    leap(main())


def test_who_waits_for_a_busy_home_goes_elsewhere_in_the_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        dispatch = Dispatch(clock=loop.time)
        dispatch.admit(upstream("a"))
        story = "once upon a time " * 400
        async with dispatch.lease(ask(story)):
            dispatch.admit(upstream("b"))
            async with dispatch.lease(ask(story, "yes", "go on")) as second:
                assert second.upstream.name == "b"
                assert 0 < second.waited_s == loop.time() < 60
                assert second.position == 1

    leap(main())


async def test_a_place_in_line_and_the_wait_for_it_are_known() -> None:
    now_s = 100.0
    dispatch = Dispatch(clock=lambda: now_s)
    dispatch.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        async with AsyncExitStack() as inner:
            await hold(inner, dispatch)

            async def wait() -> None:
                lease = await stack.enter_async_context(dispatch.lease(ask("two")))
                assert (lease.position, lease.waited_s) == (1, 4.0)

            group.create_task(wait())
            await settle()
            now_s = 104.0
            line = dispatch.lines()["chat"]
            assert (line.interactive, line.batch, line.oldest_wait_s) == (1, 0, 4.0)
            assert line.expected_wait_s > 0
        await settle()


async def test_who_leaves_gives_up_its_place_at_once() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await hold(stack, dispatch)
        waiting = group.create_task(hold(stack, dispatch))
        await settle()
        waiting.cancel()
        await settle()
        assert dispatch.lines()["chat"].interactive == 0


async def test_what_needs_no_slot_waits_in_no_line() -> None:
    dispatch = Dispatch(ProxySettings(line_max=0))
    dispatch.admit(upstream("a"))
    async with AsyncExitStack() as stack:
        await hold(stack, dispatch)
        async with dispatch.lease(ask("look", kind=Kind.LOOK)) as look:
            assert dispatch.pulse("a").held == 2
            look.complete()
            look.learn(None, None)
            assert len(dispatch.seats()[0].leases) == 1


# A model that is not up.


async def test_whoever_waits_for_a_model_goes_on_when_it_is_admitted() -> None:
    dispatch = Dispatch()
    dispatch.loader = Loads(asyncio.Event().wait)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        waiting = group.create_task(hold(stack, dispatch))
        await settle()
        assert dispatch.lines()["chat"].interactive == 1
        dispatch.admit(upstream("a"))
        assert await waiting == "a"


async def test_the_line_is_bounded_while_a_model_loads() -> None:
    dispatch = Dispatch(ProxySettings(line_max=1))
    dispatch.loader = Loads(asyncio.Event().wait)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        waiting = group.create_task(hold(stack, dispatch))
        await settle()
        with pytest.raises(LineFull):
            await hold(stack, dispatch)
        waiting.cancel()


def test_a_load_that_outlasts_the_patience_is_told_as_a_load() -> None:
    async def main() -> None:
        dispatch = Dispatch()
        dispatch.loader = Loads(asyncio.Event().wait)  # type: ignore[arg-type]
        for kind in (Kind.CHAT, Kind.LOOK):
            with pytest.raises(Loading, match="still loading"):
                async with dispatch.lease(ask("a", patience_s=2, kind=kind)):
                    pass

    leap(main())


async def test_what_the_loader_says_is_what_the_client_hears() -> None:
    async def fail() -> None:
        raise Unavailable("chat cannot answer: no such file")

    dispatch = Dispatch()
    dispatch.loader = Loads(fail)
    with pytest.raises(Unavailable, match="no such file"):
        async with dispatch.lease(ask("a")):
            pass
    assert dispatch.lines()["chat"].interactive == 0


async def test_who_waits_when_the_last_instance_goes_has_it_brought_up_again() -> None:
    dispatch = Dispatch()
    began = asyncio.Event()

    async def load() -> None:
        began.set()
        await asyncio.Event().wait()

    dispatch.loader = Loads(load)
    dispatch.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await hold(stack, dispatch)
        waiting = group.create_task(hold(stack, dispatch))
        await settle()
        assert not began.is_set()
        dispatch.withdraw("a")
        await began.wait()
        dispatch.admit(upstream("b"))
        assert await waiting == "b"


async def test_a_slot_that_was_promised_is_taken_back_with_its_instance() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        async with dispatch.lease(ask("one")) as first:
            waiting = group.create_task(hold(stack, dispatch))
            await settle()
            first.complete()  # the slot is promised, but who waits does not know it yet
            dispatch.withdraw("a")
            dispatch.admit(upstream("b"))
        assert await waiting == "b"


# What is held.


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
    dispatch.admit(upstream("a", slots=3))
    ends: list[str] = []

    async def be_cut() -> None:
        with pytest.raises(UpstreamStopped, match="a was stopped"):
            async with dispatch.lease(ask("hello")):
                await asyncio.Event().wait()
        ends.append("cut")

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(be_cut())
        await settle()
        await dispatch.close("a")
        assert dispatch.busy("a") == 0
    assert ends == ["cut"] * 3


async def test_closing_twice_and_closing_the_unknown_are_nothing() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    await dispatch.close("a")
    await dispatch.close("a")
    await dispatch.idle("a")
    assert not dispatch.seats()


async def test_a_pulse_tells_what_is_held_what_is_awaited_and_what_came() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a", slots=2))
    assert dispatch.pulse("a") == Pulse()
    async with dispatch.lease(ask("one")) as first, dispatch.lease(ask("two")):
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
    async with dispatch.lease(ask("one")) as lease:
        lease.hear(b":\n\n:\n\n")
        assert dispatch.pulse("a").bytes_heard == 0


async def test_how_far_a_request_has_come_is_known() -> None:
    now_s = 10.0
    dispatch = Dispatch(clock=lambda: now_s)
    dispatch.admit(upstream("a"))
    async with dispatch.lease(ask("hello " * 100, client="ann")) as lease:
        (facts,) = dispatch.seats()[0].leases
        assert (facts.client, facts.phase, facts.prompt_done, facts.cached) == (
            "ann",
            "prefill",
            0,
            0,
        )
        assert facts.prompt_total > 100
        lease.progressed(64, 120, 32)
        (facts,) = dispatch.seats()[0].leases
        assert (facts.prompt_done, facts.prompt_total, facts.cached) == (64, 120, 32)
        now_s = 12.0
        lease.decoded()
        lease.decoded(2)
        (facts,) = dispatch.seats()[0].leases
        assert (facts.phase, facts.prompt_done, facts.decoded) == ("decode", 120, 3)
        assert (facts.began_at_s, facts.first_token_at_s) == (10.0, 12.0)


async def test_what_an_instance_is_good_for_outlasts_a_time_out_of_service() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    assert dispatch.seats()[0].prefill_tps == 0
    async with dispatch.lease(ask("one")) as lease:
        lease.complete()
        lease.learn(Timings(0, 100, 100.0, 10, 1000.0), None)
    dispatch.withdraw("a")
    dispatch.admit(upstream("a"))
    (seat,) = dispatch.seats()
    assert (seat.prefill_tps, seat.decode_tps) == (1000.0, 10.0)


# Being cut.


async def test_of_two_cuts_the_first_counts() -> None:
    async def be_cut_twice() -> None:
        async with Flight(Flights()) as flight:
            flight.cut(Unavailable("first"))
            flight.cut(Unavailable("second"))
            await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="first"):
        await be_cut_twice()


async def test_a_client_that_leaves_is_not_taken_for_a_cut() -> None:
    async def wait() -> None:
        async with Flight(Flights()):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


async def test_a_timeout_of_the_blocks_own_is_not_taken_for_a_cut() -> None:
    with pytest.raises(TimeoutError):
        async with Flight(Flights()):
            raise TimeoutError


async def test_a_client_that_leaves_as_it_is_cut_has_left() -> None:
    async def wait() -> None:
        async with flight:
            await asyncio.Event().wait()

    flight = Flight(Flights())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait())
        await asyncio.sleep(0)
        flight.cut(Unavailable("cut"))
        task.cancel()
    assert task.cancelled()


async def test_a_block_that_ends_before_it_waits_is_not_cut() -> None:
    async with Flight(Flights()) as flight:
        flight.cut(Unavailable("late"))
    await asyncio.sleep(0)  # where it would be cancelled


def test_an_upstream_keeps_its_key_out_of_its_repr() -> None:
    assert "key" not in repr(upstream("a")).replace("api_key", "")


def test_an_address_of_version_6_stands_in_brackets() -> None:
    assert Upstream("a", "chat", 1, None, "::1", 8081, "").authority == "[::1]:8081"
