"""Where the time of a request goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.proxy_harness import ProxyHarness, until
from support.requests import ask
from support.upstream import Call

from proxy.observe.record import PHASES, Timeline
from proxy.router.lease import Completion
from proxy.router.router import Router
from proxy.upstream.upstream import Timings

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
END = b"data: [DONE]\n\n"

At = Callable[[float], None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """Sets the clock."""

    def to(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: 100 + seconds)

    to(0)
    return to


def parts(timeline: Timeline, engine_decode_ms: float | None = None) -> dict[str, float]:
    """Return the phases that took any time, in milliseconds."""
    found = dict(timeline.times_ms(engine_decode_ms))
    assert sum(found.values()) == pytest.approx(2 * found.pop("duration_ms"))
    return {name: ms for name, ms in found.items() if ms}


def test_the_phases_add_up_also_with_a_retry(at: At) -> None:
    timeline = Timeline()
    at(0.25)
    timeline.wait()
    at(1)
    timeline.wait("evict")
    at(2)
    timeline.wait("load")
    at(4)
    timeline.wait()
    timeline.begin_prefill(104)
    at(4.5)
    timeline.end_lease()  # it broke off
    timeline.wait()
    at(5)
    timeline.begin_prefill(104.75, slots_s=0.25)
    at(6)
    timeline.note_token()
    assert timeline.first_token_ms == 6000
    at(8)
    timeline.end_lease()
    at(8.5)
    assert parts(timeline) == {
        "queued_ms": 1000,
        "evict_ms": 1000,
        "load_ms": 2000,
        "slots_ms": 250,
        "prefill_ms": 1500,
        "decode_ms": 2000,
        "other_ms": 750,
    }


def test_of_several_slots_the_furthest_counts(at: At) -> None:
    timeline = Timeline()
    timeline.begin_prefill(100)
    at(1)
    timeline.wait()  # for one more slot
    at(2)
    timeline.note_token()
    timeline.begin_prefill(101)
    at(3)
    timeline.end_lease()
    at(4)
    timeline.end_lease()
    assert parts(timeline) == {"prefill_ms": 2000, "decode_ms": 2000}


def test_a_client_that_does_not_read_stalls_in_any_state_of_the_engine(at: At) -> None:
    timeline = Timeline()
    timeline.begin_prefill(100)
    at(1)
    with timeline.time_stall():
        at(2)
        timeline.note_token()
        at(4)
    at(5)
    timeline.end_lease()
    assert parts(timeline) == {"prefill_ms": 1000, "stalled_ms": 3000, "decode_ms": 1000}


def test_a_whole_response_is_divided_as_the_engine_says(at: At) -> None:
    timeline = Timeline()
    timeline.begin_prefill(100)
    at(2)
    timeline.end_lease()
    assert parts(timeline, 1500) == {"prefill_ms": 500, "decode_ms": 1500}
    assert parts(timeline, 1500) == {"prefill_ms": 500, "decode_ms": 1500}


def adds_up(event: dict[str, Any]) -> bool:
    found: float = sum(event[f"{phase}_ms"] for phase in PHASES)
    return found == pytest.approx(event["duration_ms"])


async def phases(proxy: ProxyHarness) -> dict[str, str]:
    async with proxy.http.get("/corral/v1/requests") as response:
        return {request["id"]: request["phase"] for request in (await response.json())["requests"]}


async def test_a_request_that_is_cancelled_before_it_has_a_slot_has_its_waits(
    proxy: ProxyHarness,
) -> None:
    proxy.loader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(proxy.send())
        await proxy.loader.began.wait()
        (request,) = await phases(proxy)
        async with proxy.http.post(f"/corral/v1/requests/{request}/cancel"):
            pass
    (event,) = proxy.events("request.rejected")
    assert event["load_ms"] > 0
    assert (event["client"], event["path"]) == ("127.0.0.1", "/v1/chat/completions")
    assert event["cancelled"] == "operator"
    assert adds_up(event)


async def test_a_stream_that_its_client_does_not_read_is_stalled(proxy: ProxyHarness) -> None:
    async def talks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(TOKEN)
        await call.chunk(TOKEN * 200_000)
        await call.chunk(END)
        await call.end()

    await proxy.fake(talks)
    async with proxy.ask(stream=True) as response:
        await response.content.readuntil(b"\n\n")
        while "stalled" not in (await phases(proxy)).values():
            pass
        async for _ in response.content.iter_any():
            pass
    await until(lambda: bool(proxy.events("request.finished")))
    (event,) = proxy.events("request.finished")
    assert event["stalled_ms"] > 0
    assert event["streamed"]
    assert adds_up(event)


async def test_the_list_of_slots_before_a_turn_is_timed(proxy: ProxyHarness) -> None:
    now_s = 100.0

    async def answer(call: Call) -> None:
        nonlocal now_s
        now_s += 3  # only while the engine lists its slots
        page = b'[{"id":0,"is_processing":false},{"id":1,"id_task":0,"is_processing":false}]'
        await call.head("Content-Type: application/json", f"Content-Length: {len(page)}")
        await call.send(page)

    router = Router(clock=lambda: now_s)
    fake = await proxy.fake(answer, is_admitted=False)
    fake.says_slots = False
    router.admit(replace(fake.upstream(), slots=2, can_name_slots=True))
    for texts, slots_s in ((("hello",), 0), (("hello", "hi", "more"), 3)):
        async with router.lease(ask(*texts)) as lease:
            reply = {"role": "assistant", "content": "hi"}
            router.finish(lease, Completion(Timings(0, 8, 1.0, 2, 1.0), reply))
        assert lease.slots_s == slots_s
