"""The requests in a capture, and its end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import orjson
from support.requests import ask

from proxy.errors import RequestCancelled
from proxy.forward.inspection import Exchange
from proxy.observe.record import AccessRecord, Timeline
from supervisor.experiments.capture import Recording
from supervisor.experiments.capture_lines import CaptureLimits

LIMITS = CaptureLimits(duration_s=600, size_bytes=1024**2)
CHAT = replace(ask("hello"), body=b'{"messages": [{"role": "user", "content": "hello"}]}')


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def recording(limits: CaptureLimits = LIMITS, **options: Any) -> tuple[Recording, Clock]:
    clock = Clock()
    return Recording("chat", limits, clock, **options), clock


def begin(recording: Recording) -> Exchange:
    return cast("Exchange", recording.observe(CHAT))


def end(exchange: Exchange, failure: BaseException | None = None) -> None:
    exchange.end(AccessRecord("req_1", Timeline()), failure)


async def lines_of(recording: Recording) -> list[dict[str, Any]]:
    async with aclosing(recording.lines(b'{"type":"capture"}\n')) as lines:
        return [orjson.loads(line) async for line in lines if line != b"\n"]


async def test_a_response_has_its_pieces_with_their_times() -> None:
    one, clock = recording()
    exchange = begin(one)
    exchange.begin(200, "text/event-stream")
    clock.now_s += 0.5
    exchange.add("data: ü"[:-1].encode() + "ü".encode()[:1])  # half a letter
    clock.now_s += 0.25
    exchange.add("ü".encode()[1:])
    end(exchange)
    one.stop("stopped")
    _, request, response, last = await lines_of(one)
    assert (request["n"], request["body"]["messages"][0]["content"]) == (1, "hello")
    assert response["chunks"] == [[500.0, "data: "], [750.0, "ü"]]
    assert (response["status"], response["failure"]) == (200, None)
    assert (last["reason"], last["requests"], last["responses"]) == ("stopped", 1, 1)


async def test_a_request_that_failed_says_why() -> None:
    one, _ = recording()
    end(begin(one), RequestCancelled("by an operator"))
    end(begin(one), asyncio.CancelledError())
    one.stop("stopped")
    failures = [line["failure"] for line in await lines_of(one) if line["type"] == "response"]
    cancelled = "cancelled: the client left, or an operator ended it"
    assert failures == ["request_cancelled: by an operator", cancelled]


async def test_other_models_are_not_observed() -> None:
    one, _ = recording()
    assert one.observe(replace(CHAT, model="other")) is None


async def test_what_does_not_fit_into_memory_is_dropped_and_counted() -> None:
    one, _ = recording(waiting_max_bytes=6000)
    exchange = begin(one)
    assert one.observe(CHAT) is None
    exchange.add(b"x" * 6000)
    end(exchange)
    one.stop("stopped")
    *_, last = await lines_of(one)
    assert (last["requests"], last["responses"], last["dropped"]) == (1, 0, 2)


async def test_after_the_last_request_its_response_is_awaited() -> None:
    one, _ = recording(replace(LIMITS, requests=1))
    exchange = begin(one)
    assert one.observe(CHAT) is None
    assert one.reason is None
    end(exchange)
    assert one.reason == "requests"


async def test_it_ends_before_it_is_larger_than_its_limit() -> None:
    one, _ = recording(replace(LIMITS, size_bytes=1500))
    for _ in range(9):
        end(begin(one))
    found = await lines_of(one)
    assert sum(len(orjson.dumps(line)) + 1 for line in found) <= 1500
    assert found[-1]["reason"] == "size"
    assert found[-1]["requests"] + found[-1]["responses"] + found[-1]["dropped"] == 18


async def test_it_ends_with_its_time() -> None:
    one, clock = recording()
    clock.now_s += 600
    assert (await lines_of(one))[-1]["reason"] == "time"
