"""The record of one request, its phases, the event at its end, and the requests in flight.

    request.finished    a model got it: answered, broken off, or its client disconnected (499)
    request.rejected    no model got it
    upstream.failed     an instance failed; in addition to the other two

The proxy's own endpoints are logged only when rejected, because of health probes. `RequestTrace` is
for code that must not import OpenTelemetry.

Requests in flight are counted, waited for, and aborted from outside: the task of an aborted request
gets the given error at its next await, and closes what it opened. All changes happen in methods
without `await`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeVar

from aiohttp import web
from multidict import CIMultiDict

from proxy.errors import ProxyError, RequestCancelled
from proxy.observe.cache_finding import CacheFinding
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Timings

Phase = Literal[
    "other", "queued", "evict", "load", "slots", "prefill", "decode", "paused", "stalled"
]
PHASES: Final[tuple[Phase, ...]] = (
    "queued",
    "evict",
    "load",
    "slots",
    "prefill",
    "decode",
    "paused",
    "stalled",
    "other",
)
_WAITS: Final = frozenset({"other", "queued", "evict", "load", "paused"})
_NAMES: Final[Mapping[Phase, str]] = {phase: f"{phase}_ms" for phase in PHASES}
_NO_TIMES_MS: Final = dict.fromkeys(_NAMES.values(), 0.0)


@dataclass(frozen=True, slots=True)
class LoadCause:
    """Why a request waited for a load, as far as that is known."""

    load_group: str | None = None  # by whose rule other models had to be unloaded first
    gave_way_ms: float | None = None  # for how long other programs had had the model's memory


class Timeline:
    """Times the phases of one request.

    A request in several slots is in the phase of its furthest slot, even while it waits for another
    slot. While the client does not read, the request is stalled. The phases add up to its duration.

    Attributes:
        began_at_s: Monotonic time.
    """

    __slots__ = (
        "_charged",
        "_leases",
        "_phase",
        "_since_s",
        "_spent_s",
        "_stalls",
        "began_at_s",
        "first_token_ms",
        "load_cause",
    )

    def __init__(self) -> None:
        self.began_at_s = self._since_s = time.monotonic()
        # Time from the beginning to the first token; None before it.
        self.first_token_ms: float | None = None
        self.load_cause: LoadCause | None = None
        self._phase: Phase = "other"
        self._charged: Phase = "other"  # the phase, or `stalled`
        self._spent_s: dict[Phase, float] = {}  # of the phases that have ended
        self._leases = 0
        self._stalls = 0

    def load_fields(self) -> dict[str, Any]:
        """Return the cause of a load; it is too rare for fields of each request."""
        known = asdict(self.load_cause) if self.load_cause else {}
        return {name: value for name, value in known.items() if value is not None}

    def wait(self, phase: Phase = "queued") -> None:
        """Begin to wait for a slot, for the memory of a model (`evict`) or for its load.

        `paused` is the wait of a request that has yielded its slot.
        """
        if not self._leases:
            self._enter(phase, time.monotonic())

    def begin_prefill(self, at_s: float, slots_s: float = 0.0) -> None:
        """Note that a slot was leased at this time; `end_lease` follows.

        `slots_s` is the time since then for which the engine listed its slots.
        """
        self._leases += 1
        if self._phase in _WAITS:
            self._enter("prefill", max(at_s, self._since_s))
            if slots_s:
                self._spent_s["slots"] = self._spent_s.get("slots", 0.0) + slots_s
                self._since_s += slots_s

    def note_token(self) -> None:
        """Note generated text; only the first call counts, and the first of a retry."""
        if self.first_token_ms is not None and self._phase != "prefill":
            return
        now_s = time.monotonic()
        if self.first_token_ms is None:
            self.first_token_ms = int((now_s - self.began_at_s) * 10_000) / 10
        if self._phase == "prefill":
            self._enter("decode", now_s)

    def end_lease(self) -> None:
        self._leases -= 1
        if not self._leases:
            self._enter("other", time.monotonic())

    def end_wait(self) -> None:
        if not self._leases:
            self._enter("other", time.monotonic())

    @contextmanager
    def time_stall(self) -> Iterator[None]:
        """Count the time of the block as a wait for the client to read."""
        self._stalls += 1
        self._enter(self._phase, time.monotonic())
        try:
            yield
        finally:
            self._stalls -= 1
            self._enter(self._phase, time.monotonic())

    @property
    def is_stalled(self) -> bool:
        return self._stalls > 0

    def times_ms(self, engine_decode_ms: float | None = None) -> Mapping[str, float]:
        """Return the duration until now and the time of each phase; `other_ms` is the rest.

        Args:
            engine_decode_ms: The engine's decode time, to split the time of a response that is not
                a stream and so has no time of its first token.
        """
        now_s, spent_s = time.monotonic(), self._spent_s
        self._enter(self._phase, now_s)
        if engine_decode_ms and "decode" not in spent_s and (prefill_s := spent_s.get("prefill")):
            spent_s["decode"] = min(prefill_s, engine_decode_ms / 1000)
            spent_s["prefill"] = prefill_s - spent_s["decode"]
        times_ms = _NO_TIMES_MS.copy()
        duration_ms = rest_ms = int((now_s - self.began_at_s) * 10_000) / 10
        for phase, spent in spent_s.items():
            if phase != "other":  # the rest
                times_ms[_NAMES[phase]] = ms = int(spent * 10_000) / 10
                rest_ms -= ms
        times_ms["other_ms"] = int(rest_ms * 10 + 0.5) / 10 if rest_ms > 0 else 0.0
        times_ms["duration_ms"] = duration_ms
        return times_ms

    def _enter(self, phase: Phase, at_s: float) -> None:
        spent_s, charged = self._spent_s, self._charged
        spent_s[charged] = spent_s.get(charged, 0.0) + at_s - self._since_s
        self._since_s, self._phase = at_s, phase
        self._charged = "stalled" if self._stalls else phase


# The fate of a broken call: repaired, generated again, neither; or repaired in the history.
CallOutcome = Literal["repaired", "regenerated", "failed", "history"]


class RequestTrace(Protocol):
    def pass_on(self, headers: CIMultiDict[str]) -> None:
        """Add it to the headers of a request to an instance or a node."""

    def end(self, name: str, fields: Mapping[str, object]) -> None:
        """Send the spans of a request if `name` is its last event."""


class Tracer(Protocol):
    """Begins traces; `close` sends the remaining ones within half a second."""

    def begin(self, request: web.BaseRequest) -> RequestTrace: ...

    def close(self) -> None: ...


CLIENT_GONE: Final = 499
# Limit for texts in the log that may quote a client.
_QUOTABLE_MAX_CHARACTERS: Final = 400


class Emit(Protocol):
    """Receives an event with all its fields; must not fail and must not block."""

    def __call__(self, name: str, /, **fields: object) -> None: ...


# Receives the name of an event, and its fields as they are.
Report = Callable[[str, Mapping[str, object]], None]


def discard(_name: str, /, *_: object, **_fields: object) -> None:
    """An `Emit` and a `Report` that ignores events."""


def shorten_for_log(text: str) -> str:
    """Return a client's text for the log: shortened, control characters escaped."""
    shown = text[:_QUOTABLE_MAX_CHARACTERS]
    escaped = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in shown)
    return escaped + ("…" if shown != text else "")


class AccessRecord:
    """The record of one request, filled in as the request proceeds."""

    # Name of its API key, or its address; None for endpoints that no instance answers.
    client: str | None = None
    path: str | None = None  # Path of the endpoint, None likewise.
    model: str | None = None
    kind: EndpointKind | None = None
    is_stream: bool | None = None
    priority = "interactive"
    # Number of its conversation in this process; None if the prompt identifies none.
    conversation: int | None = None
    # Whether it went to the other side of a trial because its own had no free slot.
    is_diverted = False
    instance: str | None = None
    slot: int | None = None  # The last `id_slot`; None if the engine chose.
    rules: str | None = None  # The prompt rules that changed its prompt, with spaces.
    # The client's status, that of the error that broke the response off, or 499 if the client
    # disconnected; None before that.
    status: int | None = None
    timings: Timings | None = None
    # The cache finding; None if the instance reports nothing.
    cache: CacheFinding | None = None
    trace: RequestTrace | None = None
    hides_others = False  # Whether its client may not see other clients' cached tokens.
    expected_cached = 0  # Prompt tokens expected in the instance's cache.
    _attempts = 0
    _before_yield: Timings | None = None
    _first_byte_ms: float | None = None

    def __init__(self, request_id: str, timeline: Timeline) -> None:
        self.request_id = request_id
        self.timeline = timeline
        # These are read at each end; a default of the class would be read more slowly.
        # The model that the client named, if another model got the request.
        self.fallback_for: str | None = None
        # Code of the error that the client got or that broke its response off.
        self.code: str | None = None
        self.bytes_out = 0
        # How often another engine continued the answer after the one before had ended.
        self.continued = 0
        # Calls of tools by their fate; None if there was nothing to do.
        self.calls: Counter[CallOutcome] | None = None
        self.yields = 0  # How often it gave its slot to a request of higher priority.

    def set_instance(
        self, instance: str, expected_cached: int = 0, conversation: int | None = None
    ) -> None:
        """Note that an instance got the request, with `expected_cached` prompt tokens cached."""
        self.instance = instance
        self.conversation = conversation
        self._attempts += 1
        self.expected_cached = expected_cached

    def note_yield(self, part: Timings) -> None:
        """Note that the request gave up its slot, in which this part of its answer was computed."""
        self.yields += 1
        self._attempts -= 1  # that was no failure
        self._before_yield = part.continuing(self._before_yield)

    def add_parts(self) -> None:
        """Add the parts of the answer that were computed before the request gave up its slots."""
        if self.timings:
            self.timings = self.timings.continuing(self._before_yield)

    def part(self) -> AccessRecord:
        part = AccessRecord(self.request_id, self.timeline)
        part.model = self.model
        return part

    def add(self, part: AccessRecord) -> None:
        """Add the record of an upstream request that ended."""
        self._attempts = max(self._attempts, part._attempts)
        if part.timings:
            self.expected_cached += part.expected_cached if self.timings else 0
            self.timings = part.timings.plus(self.timings)
            self.cache = self.cache or part.cache

    def count_calls(self, outcome: CallOutcome, count: int) -> None:
        """Count calls of tools that were broken."""
        if count:
            self.calls = Counter(self.calls or {}) + Counter({outcome: count})

    def forget_answer(self) -> Timings | None:
        """Discard the answer's timings and return them, because another answer is requested."""
        discarded, self.timings = self.timings, None
        self.timeline.first_token_ms = None
        return discarded

    def count(self, chunk: bytes) -> None:
        if chunk and not self.bytes_out:
            # Whole tenths, rounded down like the times of the timeline.
            self._first_byte_ms = int((time.monotonic() - self.timeline.began_at_s) * 10_000) / 10
        self.bytes_out += len(chunk)

    def fail(self, error: ProxyError) -> None:
        self.status, self.code = error.status, error.code

    def figures(self) -> dict[str, Any]:
        """Return the fields of `request.finished` that explain the request until now."""
        return {
            "request": self.request_id,
            "model": self.model,
            "instance": self.instance,
            **self.timeline.load_fields(),
            "first_token_ms": self.timeline.first_token_ms,
            "tool_calls": self.calls,
            "cache": self.cache.as_fields() if self.cache else None,
            "rules": self.rules,
            **self.timeline.times_ms(self.timings.decode_ms if self.timings else None),
            **self._tokens(),
        }

    def emit(self, report: Report, rejected_by: ProxyError | None) -> None:
        """Report the event at its end, to its trace too."""
        times_ms = self.timeline.times_ms(self.timings.decode_ms if self.timings else None)
        fields: dict[str, object]
        if rejected_by and not self.instance:
            name, fields = (
                "request.rejected",
                {
                    "request": self.request_id,
                    "model": shorten_for_log(self.model) if self.model else None,
                    "client": self.client,
                    "path": shorten_for_log(self.path) if self.path else None,
                    "status": rejected_by.status,
                    "code": rejected_by.code,
                    "reason": shorten_for_log(rejected_by.message),
                    "cancelled": self._cancelled_by() if self.status == CLIENT_GONE else None,
                    **times_ms,
                },
            )
        elif self.model:
            name, fields = (
                "request.finished",
                {
                    "request": self.request_id,
                    "client": self.client,
                    "path": self.path,
                    "model": self.model,
                    "fallback_for": self.fallback_for,
                    "instance": self.instance,
                    "slot": self.slot,
                    "kind": self.kind.label if self.kind else None,
                    "streamed": self.is_stream,
                    "priority": self.priority,
                    "conversation": self.conversation,
                    "diverted": self.is_diverted or None,
                    "status": self.status,
                    "code": self.code,
                    "attempts": self._attempts,
                    "continued": self.continued or None,
                    "rules": self.rules,
                    "tool_calls": self.calls,
                    "yields": self.yields or None,
                    "first_byte_ms": self._first_byte_ms,
                    "first_token_ms": self.timeline.first_token_ms,
                    "bytes_out": self.bytes_out,
                    "cancelled": self._cancelled_by() if self.status == CLIENT_GONE else None,
                    "cache_cause": self.cache.cause if self.cache else None,
                    "cache_tier": self.cache.tier if self.cache else None,
                    "cache": self.cache.as_fields() if self.cache else None,
                    **times_ms,
                    **self._tokens(),
                },
            )
            fields |= self.timeline.load_fields()
        else:
            return
        report(name, fields)
        if self.trace:
            self.trace.end(name, fields)

    def emit_upstream_failure(self, emit: Emit, error: ProxyError) -> None:
        """Emit that the instance failed this request, before or after its header."""
        emit(
            "upstream.failed",
            request=self.request_id,
            model=shorten_for_log(self.model) if self.model else None,
            instance=self.instance,
            phase="request" if self.status is None else "response",
            error=shorten_for_log(error.message),
        )

    def _cancelled_by(self) -> Literal["client", "operator"]:
        return "operator" if self.code == RequestCancelled.code else "client"

    def _tokens(self) -> dict[str, float | None]:
        timings = self.timings
        return {
            "expected_cached_tokens": self.expected_cached if timings else None,
            "cached_tokens": timings.cached_tokens if timings else None,
            "prompt_tokens": timings.prompt_tokens if timings else None,
            "decoded_tokens": timings.decoded_tokens if timings else None,
            # Times are 0 if the instance reports only tokens, as on /v1/messages.
            "engine_prefill_ms": (timings.prompt_ms or None) if timings else None,
            "engine_decode_ms": (timings.decode_ms or None) if timings else None,
            "drafted_tokens": timings.drafted_tokens if timings else None,
            "accepted_tokens": timings.accepted_tokens if timings else None,
        }


def new_request_id() -> str:
    return f"req_{os.urandom(12).hex()}"


class InFlightRequest:
    """A request that is in flight during a `with` block.

    If it is aborted, the block raises the given error. As with `asyncio.timeout`, that is distinct
    from a cancellation of the task, which means that the client left.
    """

    __slots__ = (
        "_cancel_soon",
        "_cancelled_before",
        "_is_cancelled",
        "_requests",
        "_task",
        "cut_by",
        "is_listed",
        "record",
    )

    def __init__(
        self,
        in_flight: InFlight[Any],
        record: AccessRecord | None = None,
        *,
        is_listed: bool = False,
    ) -> None:
        self._requests = in_flight
        self.record = record  # None if no instance is to answer it, or another one counts it
        self.is_listed = is_listed  # whether operators see it; it is a client's, and no part of one
        self.cut_by: ProxyError | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelled_before = 0
        self._is_cancelled = False
        self._cancel_soon: asyncio.Handle | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "a block runs in a task"  # noqa: S101 (for mypy)
        self._cancelled_before = self._task.cancelling()
        self._requests.members.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        in_flight = self._requests
        in_flight.members.discard(self)
        if in_flight.emptied is not None and not in_flight.members:
            in_flight.emptied.set()
        task, self._task = self._task, None
        if self._cancel_soon is not None:
            self._cancel_soon.cancel()
        if task is None or not self._is_cancelled:
            return
        is_ours = task.uncancel() <= self._cancelled_before
        if is_ours and kind is asyncio.CancelledError and self.cut_by is not None:
            raise self.cut_by from None

    def abort(self, error: ProxyError) -> None:
        """End the request with this error. Only the first call counts."""
        if self.cut_by is None:
            self.cut_by = error
            # Not at once: the caller may be this task itself, which is then not at an await.
            self._cancel_soon = asyncio.get_running_loop().call_soon(self._cancel)

    def cut(self, error: ProxyError) -> None:
        """End the request with this error, in the wait in which its task is; not from that task."""
        self.cut_by = error
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._is_cancelled = True
            self._task.cancel()


R = TypeVar("R", bound=InFlightRequest)


class InFlight(Generic[R]):
    """The requests in flight of one holder; their blocks change `members`, and set `emptied`."""

    def __init__(self) -> None:
        self.members: set[R] = set()
        self.emptied: asyncio.Event | None = None  # while something waits for it

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[R]:
        return iter(self.members)

    def abort(self, error: ProxyError) -> None:
        for request in self.members:
            request.abort(error)

    async def wait_empty(self) -> None:
        while self.members:
            if self.emptied is None or self.emptied.is_set():
                self.emptied = asyncio.Event()
            await self.emptied.wait()
        self.emptied = None


class ServerState:
    """The forwarded requests in flight, and whether new ones are refused."""

    def __init__(self, process: str = "") -> None:
        self.process = process  # Id of this process for other proxies.
        self.url = ""  # The server's URL on this machine, once it listens.
        self.in_flight: InFlight[InFlightRequest] = InFlight()
        # Endless streams, which do not delay a drain.
        self.watching: InFlight[InFlightRequest] = InFlight()
        self.is_draining = False
