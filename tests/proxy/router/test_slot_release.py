"""The slot of a request that was cut is given back when the engine no longer uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.proxy_harness import ProxyHarness
from support.requests import ask, upstream
from support.slots import busy_slots
from support.upstream import Call
from support.virtual_time import run_in_virtual_time

from proxy.errors import UpstreamConnectFailed
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.engine_state import SlotState, get_slots
from proxy.upstream.upstream import Upstream

EVENT = b'data: {"n":0}\n\n'


class Overdue:
    """Keeps the reports, and withdraws the instance if it is to."""

    router: Router

    def __init__(self, *, withdraws: bool = False) -> None:
        self.reasons: list[tuple[str, str]] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self._withdraws = withdraws

    def emit(self, name: str, /, **fields: object) -> None:
        self.events.append((name, fields))

    def overdue(self, upstream: Upstream, reason: str, /) -> None:
        self.reasons.append((upstream.name, reason))
        if self._withdraws:
            self.router.withdraw(upstream.name)


class Engine:
    """Says how many of its slots are in use, and remembers when it was asked."""

    def __init__(self, *busy: int | None) -> None:
        self.busy = list(busy)
        self.asked_at_s: list[float] = []

    async def list_slots(self, _: Upstream) -> list[SlotState] | None:
        self.asked_at_s.append(asyncio.get_running_loop().time())
        busy = self.busy.pop(0) if len(self.busy) > 1 else self.busy[0]
        return None if busy is None else busy_slots(busy)


def tended(
    story: Callable[[Router], Coroutine[Any, Any, None]],
    engine: Engine,
    overdue: Overdue | None = None,
) -> None:
    """Live through a story with a dispatch that looks after its slots, in no time."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        listener = overdue or Overdue()
        router = listener.router = Router(
            ProxySettings(), listener.emit, clock=clock, list_slots=engine.list_slots
        )
        router.signals.overdue.connect(listener.overdue)
        router.admit(upstream("a", slots=2))
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(router.run())
            await asyncio.sleep(0)
            await story(router)
            tending.cancel()

    run_in_virtual_time(main())


async def cut(router: Router) -> None:
    """Have a request cut by its client."""
    async with router.lease(ask("hello")):
        pass


def taken(router: Router) -> list[str]:
    return [lease.phase for instance in router.instances() for lease in instance.leases]


def test_a_slot_is_kept_until_the_engine_is_idle_and_asked_for_ever_more_rarely() -> None:
    engine = Engine(1, 1, 1, 0)

    async def story(router: Router) -> None:
        await cut(router)
        assert taken(router) == ["ending"]
        assert router.activity("a").in_flight == 0
        await asyncio.sleep(0.1)
        assert taken(router) == ["ending"]
        await asyncio.sleep(0.1)
        assert taken(router) == []

    tended(story, engine)
    assert [round(at_s, 3) for at_s in engine.asked_at_s] == [0.01, 0.03, 0.07, 0.15]


def test_what_runs_on_the_engine_by_our_leave_is_not_counted_against_it() -> None:
    async def story(router: Router) -> None:
        async with router.lease(ask("goes on")):
            await cut(router)
            await asyncio.sleep(0.1)
            assert taken(router) == ["prefill"]

    tended(story, Engine(1))


def test_the_next_in_line_gets_the_slot_then_and_not_before() -> None:
    async def story(router: Router) -> None:
        await cut(router)
        await cut(router)
        async with router.lease(ask("next")) as lease:
            assert 0.02 < lease.queued_s < 0.1

    tended(story, Engine(2, 2, 1))


def test_another_request_that_ends_is_looked_after_soon() -> None:
    engine = Engine(1)

    async def story(router: Router) -> None:
        await cut(router)
        await asyncio.sleep(10)
        engine.busy = [0]
        before_s = asyncio.get_running_loop().time()
        await cut(router)
        await asyncio.sleep(0.02)
        assert engine.asked_at_s[-1] == pytest.approx(before_s + 0.01)
        assert taken(router) == []

    tended(story, engine)


def test_an_engine_that_does_not_stop_is_reported_once_and_its_slot_is_given_to_nobody() -> None:
    overdue = Overdue()

    async def story(router: Router) -> None:
        await cut(router)
        await asyncio.sleep(59)
        assert not overdue.reasons
        await asyncio.sleep(120)
        assert taken(router) == ["ending"]
        engine.busy = [0]
        await asyncio.sleep(4)
        assert taken(router) == []

    engine = Engine(1)
    tended(story, engine, overdue)
    ((name, fields),) = overdue.events
    assert (name, fields["instance"], fields["phase"]) == ("upstream.failed", "a", "end")
    assert overdue.reasons == [("a", "still computes for a request that ended 60 s ago")]


def test_the_slots_of_an_engine_that_is_withdrawn_for_that_are_given_back() -> None:
    async def story(router: Router) -> None:
        await cut(router)
        await cut(router)
        await asyncio.sleep(64)
        assert taken(router) == []

    tended(story, Engine(2), Overdue(withdraws=True))


@pytest.mark.parametrize("how", ["withdrawn", "unasked", "unreported"])
def test_a_slot_is_released_at_once_if_there_is_nothing_to_wait_for(how: str) -> None:
    async def story(router: Router) -> None:
        if how == "withdrawn":
            await cut(router)
            router.withdraw("a")
        elif how == "unasked":
            with pytest.raises(UpstreamConnectFailed):
                async with router.lease(ask("hello")):
                    raise UpstreamConnectFailed("a", "refused")
        else:
            await cut(router)
            await asyncio.sleep(0.06)
        assert taken(router) == []

    tended(story, Engine(None))


async def test_without_anybody_to_look_after_it_a_slot_is_given_back_at_once() -> None:
    router = Router()
    router.admit(upstream("a"))
    await cut(router)
    assert taken(router) == []


# The engine's own page.


@asynccontextmanager
async def answering(proxy: ProxyHarness, status: str, body: bytes) -> AsyncIterator[Upstream]:
    async def say(call: Call) -> None:
        await call.head(f"Content-Length: {len(body)}", status=status)
        await call.send(body)

    fake = await proxy.fake(say)
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
    proxy: ProxyHarness, status: str, body: bytes, busy: int | None
) -> None:
    async with answering(proxy, status, body) as engine:
        slots = await get_slots(engine, proxy.settings)
    assert busy == (None if slots is None else sum(slot.is_busy for slot in slots))


async def test_an_engine_that_is_gone_uses_no_slot(proxy: ProxyHarness) -> None:
    gone = Upstream("gone", "chat", 1, "/nowhere/gone.sock", "", 0, "")
    assert await get_slots(gone, proxy.settings) is None


async def test_the_slot_of_a_client_that_left_is_given_to_the_next(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT)
        await call.until_left()

    fake = await proxy.fake(speak)
    proxy.router.admit(fake.upstream(slots=1))
    for _ in range(2):
        async with proxy.stream(EVENT):
            assert proxy.router.count_in_flight("chat.1") == 1
    await proxy.router.wait_idle("chat.1")
