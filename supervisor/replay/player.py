"""Sends the requests of a capture to one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.forward.apis import assembler_for
from proxy.upstream.sse import InvalidEvent
from proxy.upstream.timings import Timings
from supervisor.engine_client.client import EngineClient, ErrorResponse
from supervisor.replay.answer import text_of
from supervisor.replay.played_request import PlayedRequest, played_body
from supervisor.replay.slot_choice import SlotChoice

_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Played:
    """What one request got; `failure` as a clause, with nothing else then."""

    text: str = ""
    first_token_ms: float | None = None
    timings: Timings | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How the requests are sent.

    Attributes:
        model: As the engine names it.
        slots: To choose among; 0: the engine chooses.
        concurrency: The most in flight at once; no more than slots to choose among.
        is_as_recorded: No request is sent before its time in the capture.
    """

    model: str
    slots: int
    concurrency: int
    is_as_recorded: bool


class Player:
    """Plays once. No slot gets two requests at once: they would mix their texts."""

    def __init__(
        self,
        requests: Sequence[PlayedRequest],
        client: Callable[[], EngineClient],
        options: PlayOptions,
        on_answer: Callable[[int], None],
    ) -> None:
        """`on_answer` gets the number of answers so far."""
        self._requests = requests
        self._client = client
        self._options = options
        self._on_answer = on_answer
        self._answered = [asyncio.Event() for _ in requests]
        self._free = asyncio.Semaphore(options.concurrency)
        self._slots = SlotChoice(options.slots) if options.slots else None
        self._count = 0

    async def play(self) -> list[Played]:
        """Send all; raises EngineUnreachable where the engine is gone."""
        began_at_s = time.monotonic()
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:
                for at in range(len(self._requests)):
                    await self._until_due(at, began_at_s)
                    tasks.append(group.create_task(self._play_one(at)))
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        return [task.result() for task in tasks]

    async def _until_due(self, at: int, began_at_s: float) -> None:
        """Wait for those that had ended, and for the time of the request; take a place."""
        request = self._requests[at]
        for before in request.after:
            await self._answered[before].wait()
        if self._options.is_as_recorded:
            due_ms = request.captured.at_ms - self._requests[0].captured.at_ms
            await asyncio.sleep(max(0.0, began_at_s + due_ms / _MS - time.monotonic()))
        await self._free.acquire()

    async def _play_one(self, at: int) -> Played:
        body = self._requests[at].captured.body
        slot = self._slots.take(body) if self._slots else None
        async with self._client() as client:
            result = await self._send(client, self._requests[at], slot)
        if self._slots and slot is not None:
            self._slots.give_back(slot, body)
        self._free.release()
        self._answered[at].set()
        self._count += 1
        self._on_answer(self._count)
        return result

    async def _send(self, client: EngineClient, request: PlayedRequest, slot: int | None) -> Played:
        captured = request.captured
        body = played_body(captured, self._options.model, slot)
        assembler, first_at_s = assembler_for(captured.kind, body), None
        ended: Mapping[str, Any] | None = None
        began_at_s = time.perf_counter()
        async with client.stream(captured.path, body) as events:
            if isinstance(events, ErrorResponse):
                return Played(failure=f"status {events.status}: {events.message}")
            try:
                async for event in events:
                    if "error" in event:
                        return Played(failure=f"an error in the stream: {event['error']}")
                    first_at_s = first_at_s or time.perf_counter()
                    assembler.add(event)
                    ended = _ended(event) or ended
                text = text_of(captured.kind, ended or assembler.whole())
            except (InvalidEvent, LookupError, TypeError, AttributeError) as error:
                return Played(failure=f"the answer has another format: {error!r}")
        first_ms = None if first_at_s is None else round((first_at_s - began_at_s) * _MS, 1)
        return Played(text, first_ms, Timings.read(assembler.timings()))


def _ended(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a response of the Responses API that ended at its limit, as the proxy tells it."""
    if event.get("type") != "response.incomplete":
        return None
    found: Mapping[str, Any] = event["response"]
    return found


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
