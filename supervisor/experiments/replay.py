"""Plays the requests of a capture on one engine, and compares speed and answers.

On an engine whose clients choose slots, a request takes the slot whose last prompt shares the
longest beginning with it, if that is half of the request; otherwise the least recently used slot.
The proxy knows more, but does much the same.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import orjson
from attrs import define, field

from proxy.forward.assemblers import assembler_for
from proxy.upstream.http1 import InvalidEvent
from proxy.upstream.upstream import Timings
from supervisor.bench.own_engine import private_instance
from supervisor.bench.workload import first_error, post, rate
from supervisor.engine.client import EngineClient, ErrorResponse
from supervisor.experiments.capture_lines import CapturedRequest, played_body, text_of
from supervisor.plan.plan import Plan
from supervisor.system.paths import Directories

_PROMPT: Final = ("tools", "system", "instructions", "messages", "prompt", "input")
_SHARED_MIN: Final = 0.5


class SlotChoice:
    """The slots of one engine that nothing else uses; at most one request per slot."""

    def __init__(self, slots: int) -> None:
        # Least recently used first.
        self._free: dict[int, str] = dict.fromkeys(range(slots), "")

    def take(self, body: Mapping[str, Any]) -> int:
        """Take a free slot; raises StopIteration without one."""
        text = prompt_text(body)
        shared = {slot: _count_shared_letters(text, last) for slot, last in self._free.items()}
        best = max(shared, key=lambda slot: shared[slot])
        has_enough = shared[best] and shared[best] >= _SHARED_MIN * len(text)
        slot = best if has_enough else next(iter(self._free))
        del self._free[slot]
        return slot

    def give_back(self, slot: int, body: Mapping[str, Any]) -> None:
        self._free[slot] = prompt_text(body)


def prompt_text(body: Mapping[str, Any]) -> str:
    """Return the members that begin as their conversation did, as JSON with an open end."""
    found = [body[name] for name in _PROMPT if body.get(name)]
    return orjson.dumps(found).decode().rstrip('"]}')


def _count_shared_letters(text: str, other: str) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Difference:
    """`token` counts the first token that differs, from 1, of `tokens` in the baseline."""

    token: int
    tokens: int
    expected: str
    found: str


@dataclass(slots=True)
class Played:
    """The result of one request; with `failure`, a clause, all other fields are empty.

    `difference` is that from the expected answer, if `is_compared`; None if both are equal.
    """

    text: str = ""
    first_token_ms: float | None = None
    timings: Timings | None = None
    failure: str | None = None
    is_compared: bool = False
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to play on; `slots` is the number to choose from, 0 if the engine chooses."""

    client: Callable[[], EngineClient]
    model: str
    slots: int


@define(eq=False, slots=False)
class Player:
    """Plays requests once. No slot gets two requests at once: they would mix their texts.

    `requests` are in the order in which they began; `concurrency` is at most the number of slots.
    `is_as_recorded`: none is sent before its time in the capture. `on_answer` gets the answers so
    far.
    """

    _target: Target
    _requests: Sequence[CapturedRequest]
    _concurrency: int
    _is_as_recorded: bool
    _on_answer: Callable[[int], None]
    _count: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._answered = [asyncio.Event() for _ in self._requests]
        self._free = asyncio.Semaphore(self._concurrency)
        self._slots = SlotChoice(self._target.slots) if self._target.slots else None

    async def play(self, expected: Mapping[int, str]) -> list[Played]:
        """Send all requests, and compare answers with the expected ones, by request number.

        Raises EngineUnreachable if the engine is gone, WorkloadFailed if it refuses to tokenise.
        """
        began_at_s = time.monotonic()
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:
                for at in range(len(self._requests)):
                    await self._wait_until_due(at, began_at_s)
                    tasks.append(group.create_task(self._play_request(at)))
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        played = [task.result() for task in tasks]
        async with self._target.client() as client:
            for request, answer in zip(self._requests, played, strict=True):
                text = expected.get(request.number)
                if answer.failure is None and text is not None:
                    answer.is_compared = True
                    answer.difference = await compare(client, self._target.model, text, answer.text)
        return played

    async def _wait_until_due(self, at: int, began_at_s: float) -> None:
        """Wait for the requests before this one, for its time, and for a free place."""
        request = self._requests[at]
        for before in request.after:
            await self._answered[before].wait()
        if self._is_as_recorded:
            due_ms = request.at_ms - self._requests[0].at_ms
            await asyncio.sleep(max(0.0, began_at_s + due_ms / _MS - time.monotonic()))
        await self._free.acquire()

    async def _play_request(self, at: int) -> Played:
        body = self._requests[at].body
        slot = self._slots.take(body) if self._slots else None
        async with self._target.client() as client:
            result = await self._send(client, self._requests[at], slot)
        if self._slots and slot is not None:
            self._slots.give_back(slot, body)
        self._free.release()
        self._answered[at].set()
        self._count += 1
        self._on_answer(self._count)
        return result

    async def _send(
        self, client: EngineClient, captured: CapturedRequest, slot: int | None
    ) -> Played:
        body = played_body(captured, self._target.model, slot)
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
                    if event.get("type") == "response.incomplete":  # ended at its limit
                        ended = event["response"]
                text = text_of(captured.kind, ended or assembler.assemble())
            except (InvalidEvent, LookupError, TypeError, AttributeError) as error:
                return Played(failure=f"the answer has another format: {error!r}")
        first_ms = None if first_at_s is None else round((first_at_s - began_at_s) * _MS, 1)
        return Played(text, first_ms, Timings.read(assembler.timings()))


_END = "(end)"


def first_difference(expected: Sequence[str], found: Sequence[str]) -> Difference | None:
    """Compare two answers, token by token."""
    for at, (ours, theirs) in enumerate(zip_longest(expected, found, fillvalue=_END)):
        if ours != theirs:
            return Difference(at + 1, len(expected), ours, theirs)
    return None


async def compare(client: EngineClient, model: str, expected: str, found: str) -> Difference | None:
    """Compare two answers by a model's tokens."""
    if expected == found:
        return None
    ours, theirs = [await _pieces(client, model, text) for text in (expected, found)]
    return first_difference(ours, theirs)


async def _pieces(client: EngineClient, model: str, text: str) -> list[str]:
    """Return the texts of tokens; those with part of a character come as bytes."""
    body = await post(client, "/tokenize", {"model": model, "content": text, "with_pieces": True})
    pieces = (token["piece"] for token in orjson.loads(body)["tokens"])
    return [
        piece if isinstance(piece, str) else bytes(piece).decode(errors="backslashreplace")
        for piece in pieces
    ]


def texts(requests: Sequence[CapturedRequest], played: Sequence[Played]) -> dict[int, str]:
    """Return the answers by request number."""
    pairs = zip(requests, played, strict=True)
    return {request.number: answer.text for request, answer in pairs if answer.failure is None}


@asynccontextmanager
async def own_engine(plan: Plan, directories: Directories) -> AsyncIterator[Target]:
    """Start an engine for the block; raises the errors of `private_instance`."""
    async with private_instance(plan, directories) as instance:
        yield Target(instance.client, plan.model, plan.slots if plan.has_own_slots else 0)


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates are in tokens/s, `first_token_ms` is the median; None if unknown.

    `cached_tokens` of `prompt_tokens` came from the cache.
    """

    answered: int
    failed: int
    prefill_rate: float | None
    decode_rate: float | None
    first_token_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def figures_of(played: Sequence[Played]) -> Figures:
    answered = [answer for answer in played if answer.failure is None]
    return _figures(
        [answer.timings for answer in answered],
        [answer.first_token_ms for answer in answered if answer.first_token_ms is not None],
        len(played) - len(answered),
    )


def recorded_figures(requests: Iterable[CapturedRequest]) -> Figures:
    """Return the capture's figures; first tokens are without waits for a slot or a load."""
    responses = [request.response for request in requests]
    whole = [response for response in responses if response and response.is_whole]
    first = [
        max(0.0, response.first_token_ms - response.wait_ms)
        for response in whole
        if response.first_token_ms is not None
    ]
    return _figures([response.timings for response in whole], first, len(responses) - len(whole))


def _figures(timings: Sequence[Timings | None], first_ms: Sequence[float], failed: int) -> Figures:
    known = [timing for timing in timings if timing]
    computed = sum(timing.prompt_tokens for timing in known)
    cached = sum(timing.cached_tokens for timing in known)
    decoded = sum(timing.decoded_tokens for timing in known)
    return Figures(
        answered=len(timings),
        failed=failed,
        prefill_rate=rate(computed, sum(timing.prompt_ms for timing in known)),
        decode_rate=rate(decoded, sum(timing.decode_ms for timing in known)),
        first_token_ms=statistics.median(first_ms) if first_ms else None,
        prompt_tokens=computed + cached,
        cached_tokens=cached,
        generated_tokens=decoded,
    )


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
