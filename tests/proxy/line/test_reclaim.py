"""The slot of a request that was cut is given back when the engine no longer uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes.asks import ask, upstream
from fakes.clock import leap
from fakes.house import House
from fakes.upstream import Call

from proxy.engine.upstream import Upstream
from proxy.errors import UpstreamUnreached
from proxy.line.dispatch import Dispatch
from proxy.line.reclaim import slots_in_use
from proxy.settings import ProxySettings

EVENT = b'data: {"n":0}\n\n'


class Engine:
    """Says how many of its slots are in use, and remembers when it was asked."""

    def __init__(self, *busy: int | None) -> None:
        self.busy = list(busy)
        self.asked_at_s: list[float] = []

    async def count(self, _: Upstream) -> int | None:
        self.asked_at_s.append(asyncio.get_running_loop().time())
        return self.busy.pop(0) if len(self.busy) > 1 else self.busy[0]


def tended(story: Callable[[Dispatch], Coroutine[Any, Any, None]], engine: Engine) -> None:
    """Live through a story with a dispatch that looks after its slots, in no time."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        dispatch = Dispatch(ProxySettings(), clock, engine.count)
        dispatch.admit(upstream("a", slots=2))
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(dispatch.tend())
            await asyncio.sleep(0)
            await story(dispatch)
            tending.cancel()

    leap(main())


async def cut(dispatch: Dispatch) -> None:
    """Have a request cut by its client."""
    async with dispatch.lease(ask("hello")):
        pass


def taken(dispatch: Dispatch) -> list[str]:
    return [lease.phase for seat in dispatch.seats() for lease in seat.leases]


def test_a_slot_is_kept_until_the_engine_is_idle_and_asked_for_ever_more_rarely() -> None:
    engine = Engine(1, 1, 1, 0)

    async def story(dispatch: Dispatch) -> None:
        await cut(dispatch)
        assert taken(dispatch) == ["ending"]
        assert dispatch.pulse("a").held == 0
        await asyncio.sleep(0.5)
        assert taken(dispatch) == ["ending"]
        await asyncio.sleep(0.5)
        assert taken(dispatch) == []

    tended(story, engine)
    assert [round(at_s, 3) for at_s in engine.asked_at_s] == [0.05, 0.15, 0.35, 0.75]


def test_what_runs_on_the_engine_by_our_leave_is_not_counted_against_it() -> None:
    async def story(dispatch: Dispatch) -> None:
        async with dispatch.lease(ask("goes on")):
            await cut(dispatch)
            await asyncio.sleep(0.1)
            assert taken(dispatch) == ["prefill"]

    tended(story, Engine(1))


def test_the_next_in_line_gets_the_slot_then_and_not_before() -> None:
    async def story(dispatch: Dispatch) -> None:
        await cut(dispatch)
        await cut(dispatch)
        async with dispatch.lease(ask("next")) as lease:
            assert 0.14 < lease.waited_s < 0.4

    tended(story, Engine(2, 2, 1))


def test_another_request_that_ends_is_looked_after_soon() -> None:
    engine = Engine(1)

    async def story(dispatch: Dispatch) -> None:
        await cut(dispatch)
        await asyncio.sleep(10)
        engine.busy = [0]
        before_s = asyncio.get_running_loop().time()
        await cut(dispatch)
        await asyncio.sleep(0.06)
        assert engine.asked_at_s[-1] == pytest.approx(before_s + 0.05)
        assert taken(dispatch) == []

    tended(story, engine)


def test_an_engine_that_does_not_stop_is_reported_once_and_its_slot_is_given_to_nobody() -> None:
    told: list[tuple[str, dict[str, object]]] = []
    overdue: list[tuple[str, str]] = []

    async def story(dispatch: Dispatch) -> None:
        dispatch.tell = lambda name, /, **fields: told.append((name, fields))
        dispatch.overdue = lambda upstream, why: overdue.append((upstream.name, why))
        await cut(dispatch)
        await asyncio.sleep(59)
        assert not overdue
        await asyncio.sleep(120)
        assert taken(dispatch) == ["ending"]
        engine.busy = [0]
        await asyncio.sleep(4)
        assert taken(dispatch) == []

    engine = Engine(1)
    tended(story, engine)
    ((name, fields),) = told
    assert (name, fields["instance"], fields["phase"]) == ("upstream.broke", "a", "end")
    assert overdue == [("a", "still computes for a request that ended 60 s ago")]


def test_the_slots_of_an_engine_that_is_withdrawn_for_that_are_given_back() -> None:
    async def story(dispatch: Dispatch) -> None:
        dispatch.overdue = lambda upstream, _: dispatch.withdraw(upstream.name)
        await cut(dispatch)
        await cut(dispatch)
        await asyncio.sleep(64)
        assert taken(dispatch) == []

    tended(story, Engine(2))


@pytest.mark.parametrize("how", ["withdrawn", "unasked", "not told"])
def test_a_slot_is_given_back_at_once_where_there_is_nothing_to_wait_for(how: str) -> None:
    async def story(dispatch: Dispatch) -> None:
        if how == "withdrawn":
            await cut(dispatch)
            dispatch.withdraw("a")
        elif how == "unasked":
            with pytest.raises(UpstreamUnreached):
                async with dispatch.lease(ask("hello")):
                    raise UpstreamUnreached("a", "refused")
        else:
            await cut(dispatch)
            await asyncio.sleep(0.06)
        assert taken(dispatch) == []

    tended(story, Engine(None))


async def test_without_anybody_to_look_after_it_a_slot_is_given_back_at_once() -> None:
    dispatch = Dispatch()
    dispatch.admit(upstream("a"))
    await cut(dispatch)
    assert taken(dispatch) == []


# The engine's own page.


@asynccontextmanager
async def answering(house: House, status: str, body: bytes) -> AsyncIterator[Upstream]:
    async def say(call: Call) -> None:
        await call.head(f"Content-Length: {len(body)}", status=status)
        await call.send(body)

    fake = await house.fake(say)
    fake.says_slots = False
    yield fake.upstream()


@pytest.mark.parametrize(
    ("status", "body", "busy"),
    [
        ("200 OK", b'[{"is_processing":true},{"is_processing":false},7]', 1),
        ("501 Not Implemented", b'{"error":{}}', None),
        ("200 OK", b"garbage", None),
    ],
)
async def test_the_page_is_read_for_slots_in_use(
    house: House, status: str, body: bytes, busy: int | None
) -> None:
    async with answering(house, status, body) as engine:
        assert await slots_in_use(house.settings)(engine) == busy


async def test_an_engine_that_is_gone_uses_no_slot(house: House) -> None:
    gone = Upstream("gone", "chat", 1, "/nowhere/gone.sock", "", 0, "")
    assert await slots_in_use(house.settings)(gone) is None


async def test_the_slot_of_a_client_that_left_is_given_to_the_next(house: House) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT)
        await call.until_left()

    fake = await house.fake(speak)
    house.dispatch.admit(fake.upstream(slots=1))
    for _ in range(2):
        async with house.stream(EVENT):
            assert house.dispatch.busy("chat.1") == 1
    await house.dispatch.idle("chat.1")
