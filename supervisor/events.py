"""What happens, as one typed stream: to the log, to `corral events`, to whoever listens.

The table below is the whole list of events; emitting any other name is an error, and a test holds
the table to the code. Names are `noun.past_verb`; fields carry units. No prompt and no secret is
ever a field. A listener that falls behind loses the oldest events, never blocks anybody, and is
told how many it lost by an event `events.dropped`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final, Literal, Protocol

from supervisor.failures import Throttle

Level = Literal["info", "warning", "error"]

_SLOTS: Final = ("instance", "model", "run", "slots", "tokens", "size_bytes", "duration_ms")

EVENTS: Final[Mapping[str, tuple[Level, tuple[str, ...]]]] = MappingProxyType(
    {
        "daemon.started": ("info", ("version", "url", "control", "settings")),
        "daemon.stopping": ("info", ("reason",)),
        "daemon.stopped": ("info", ("took_s",)),
        "instance.state_changed": (
            "info",
            ("instance", "model", "before", "after", "run", "reason"),
        ),
        "instance.load_progress": ("info", ("instance", "model", "run", "stage", "value")),
        "instance.withdrawn": ("info", ("instance", "model", "run", "in_flight")),
        "instance.drained": ("info", ("instance", "model", "run")),
        "instance.requests_aborted": ("warning", ("instance", "model", "run", "in_flight")),
        "instance.exit_requested": ("info", ("instance", "model", "run", "how")),
        "instance.exited": (
            "info",
            ("instance", "model", "run", "code", "signal", "up_s", "fault"),
        ),
        "instance.failed": ("error", ("instance", "model", "failures", "reason", "hint", "log")),
        "model.unloaded": ("info", ("model", "reason")),
        "model.load_refused": ("warning", ("model", "reason")),
        "slots.saved": ("info", _SLOTS),
        "slots.restored": ("info", _SLOTS),
        "slots.save_failed": ("warning", ("instance", "model", "run", "reason")),
        "slots.quarantined": ("warning", ("model", "file", "reason")),
        "slots.restore_unused": ("warning", ("instance", "model", "expected", "cached")),
        "prompt.prefilled": ("info", ("instance", "model", "run", "prompt", "tokens", "cached")),
        "prompt.stored": ("info", ("model", "prompt", "tokens")),
        "prompt.store_failed": ("warning", ("model", "reason")),
        "prompt.rejected": ("warning", ("instance", "model", "run", "prompt", "reason")),
        "speculation.measured": (
            "info",
            (
                "instance",
                "model",
                "run",
                "tokens",
                "acceptance",
                "with_tps",
                "without_tps",
                "estimate",
                "slower",
            ),
        ),
        "settings.reloaded": ("info", ("added", "removed", "changed", "kept", "notes")),
        "settings.rejected": ("warning", ("reason",)),
        "engine.orphan_killed": ("warning", ("instance", "pid", "since")),
        "node.up": ("info", ("node", "models")),
        "node.down": ("warning", ("node", "reason")),
        "request.finished": (
            "info",
            (
                "request",
                "model",
                "instance",
                "status",
                "attempts",
                "queued_ms",
                "first_byte_ms",
                "first_token_ms",
                "duration_ms",
                "bytes_out",
                "expected_cached_tokens",
                "cached_tokens",
                "prompt_tokens",
                "decoded_tokens",
                "decode_ms",
                "drafted_tokens",
                "accepted_tokens",
            ),
        ),
        "request.rejected": ("warning", ("request", "model", "status", "code", "reason")),
        "upstream.failed": ("warning", ("request", "model", "instance", "phase", "error")),
        "task.failed": ("error", ("task", "error", "traceback", "more")),
        "events.withheld": ("warning", ("event", "cause", "count")),
        "events.dropped": ("warning", ("count",)),
    }
)

_BACKLOG_MAX: Final = 1024
# What a client can cause at will, and the field that tells causes apart, which holds no text of a
# client. So many of each are told in a minute, and the rest is counted.
_CAUSED: Final[Mapping[str, str]] = MappingProxyType(
    {"request.rejected": "code", "upstream.failed": "phase"}
)
_CAUSED_MAX: Final = 30


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        name: A key of EVENTS.
        at: When, wall clock in UTC.
        fields: The fields that EVENTS lists for the name.
    """

    name: str
    at: datetime
    fields: Mapping[str, object]

    @property
    def level(self) -> Level:
        """Return how much this matters: a fault, or a draft that is in the way, is a warning."""
        match self.name:
            case "instance.exited" if self.fields["fault"]:
                return "warning"
            case "speculation.measured" if self.fields["slower"]:
                return "warning"
        return EVENTS[self.name][0]


class Emit(Protocol):
    """What tells the stream that something happened."""

    def __call__(self, name: str, /, **fields: object) -> None:
        """Tell it. `fields` must be those that EVENTS lists for `name`."""


class Listener:
    """One bounded queue of events; iterate it with `next()`."""

    def __init__(self, backlog: int = _BACKLOG_MAX) -> None:
        self._events: deque[Event] = deque()
        self._backlog = backlog
        self._dropped = 0
        self._arrived = asyncio.Event()

    def push(self, event: Event) -> None:
        """Add an event; drop the oldest when the backlog is full."""
        if len(self._events) >= self._backlog:
            self._events.popleft()
            self._dropped += 1
        self._events.append(event)
        self._arrived.set()

    async def next(self) -> Event:
        """Return the next event, waiting without limit: an idle daemon emits nothing for days."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._take()

    def _take(self) -> Event:
        if self._dropped:
            count, self._dropped = self._dropped, 0
            return Event("events.dropped", _now(), {"count": count})
        return self._events.popleft()


class EventStream:
    """Fans events out: at once to sinks (the log), by bounded queues to listeners."""

    def __init__(self, *sinks: Callable[[Event], None]) -> None:
        self._sinks = sinks
        self._listeners: set[Listener] = set()
        self._throttle = Throttle(_CAUSED_MAX, self._withheld)

    def emit(self, name: str, /, **fields: object) -> None:
        """Tell everybody. Never blocks and never fails for a listener's or a sink's sake.

        Of what clients cause, so many are told in a minute; then how many there were.

        Raises:
            KeyError: `name` is not in EVENTS.
            ValueError: `fields` are not those that EVENTS lists for `name`.
        """
        if fields.keys() != set(EVENTS[name][1]):
            raise ValueError(f"{name} takes the fields {EVENTS[name][1]}, not {tuple(fields)}")
        if name in _CAUSED and not self._throttle.admit((name, str(fields[_CAUSED[name]]))):
            return
        event = Event(name, _now(), MappingProxyType(dict(fields)))
        for sink in self._sinks:
            with suppress(OSError, ValueError):  # a disk that is full, a stream that is closed
                sink(event)
        for listener in self._listeners:
            listener.push(event)

    def _withheld(self, cause: Hashable, count: int) -> None:
        event, reason = cause if isinstance(cause, tuple) else (str(cause), "")
        self.emit("events.withheld", event=event, cause=reason, count=count)

    @contextmanager
    def listen(self) -> Iterator[Listener]:
        """Hear every event from now on, until the block ends."""
        listener = Listener()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)


def _now() -> datetime:
    return datetime.now(tz=UTC)
