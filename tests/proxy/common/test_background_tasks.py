"""Internal failures are counted, reported once a minute and retried."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

from proxy.common.background_tasks import (
    FAILURES,
    WINDOW_S,
    FailureHandler,
    Failures,
    Throttle,
    persist,
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def reported(of: Failures) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    of.report_to(lambda _name, /, **fields: events.append(fields))
    return events


async def test_failed_work_is_retried_and_counted() -> None:
    tries = []

    async def work() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise OSError(24, "Too many open files")
        return "done"

    before = FAILURES.counts["a test"]
    assert await persist("a test", work, first_pause_s=0.001) == "done"
    assert FAILURES.counts["a test"] - before == 3


async def test_cancellation_is_never_swallowed() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(persist("a test", work))
        await begun.wait()
        task.cancel()
    assert task.cancelled()


async def test_work_that_fails_while_it_is_cancelled_is_not_repeated() -> None:
    begun, tries = asyncio.Event(), []

    async def fails_at_its_end() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError(5, "Input/output error")

    async def work() -> None:
        tries.append(1)
        if len(tries) == 1:
            async with asyncio.TaskGroup() as group:
                group.create_task(fails_at_its_end())

    async with asyncio.TaskGroup() as group:
        task = group.create_task(persist("a test", work, first_pause_s=0))
        await begun.wait()
        task.cancel()
    assert task.cancelled()
    assert len(tries) == 1


def fail(depth: int) -> Exception:
    try:
        int("no number")
    except ValueError as error:
        return RuntimeError("x" * depth).with_traceback(error.__traceback__)
    return AssertionError()


def test_a_cause_is_reported_once_with_its_traceback() -> None:
    counted = Failures()
    events = reported(counted)
    for _ in range(42):
        counted.note("steward", fail(5000))
    assert counted.counts == {"steward": 42}
    (one,) = events
    assert "in fail" in one["traceback"]
    assert len(one["error"]) <= 1024
    assert len(one["traceback"]) <= 8192


def test_suppressed_failures_are_reported_at_the_end_of_the_minute() -> None:
    clock, rests = Clock(), []
    throttle = Throttle(2, lambda cause, count: rests.append((cause, count)), clock)
    assert [throttle.admit("a") for _ in range(43)] == [True, True, *[False] * 41]
    clock.now_s = WINDOW_S
    throttle.expire()
    assert rests == [("a", 41)]
    assert throttle.admit("a")


def test_excess_causes_share_one_window() -> None:
    throttle = Throttle(1, lambda *_: None, Clock())
    assert sum(throttle.admit(number) for number in range(10_000)) <= 65


async def test_a_task_without_failures_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAILURES, "counts", Counter())

    async def work() -> None:
        assert FAILURES.counts == {"a calm task": 0}

    await persist("a calm task", work)


def test_excess_tasks_are_counted_together() -> None:
    counted = Failures()
    for number in range(1000):
        counted.note(f"library {number}", fail(1))
    assert len(counted.counts) <= 65
    assert sum(counted.counts.values()) == 1000


def test_a_library_cannot_fill_the_log() -> None:
    events = reported(FAILURES)
    record = logging.LogRecord("lib", logging.ERROR, "f.py", 1, "bad %s", ("x",), None)
    for _ in range(100):
        FailureHandler().emit(record)
    assert [event["error"] for event in events] == ["bad x"]
