"""The daemon's events, and their stream to the log and to `corral events`.

`events.toml` lists them; a test compares it with the code.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, Protocol, TextIO

from proxy.common.background_tasks import Throttle
from proxy.common.toml_text import table_beside
from supervisor.output import colored

if TYPE_CHECKING:  # most commands need no metrics
    from prometheus_client import Metric

Level = Literal["info", "warning", "error"]

LOAD_PROGRESS: Final = "instance.load_progress"
DAEMON_STOPPED: Final = "daemon.stopped"

_TABLE: Final[Mapping[str, tuple[Level, str]]] = table_beside(__file__)
# Name → level and fields.
EVENTS: Final[Mapping[str, tuple[Level, tuple[str, ...]]]] = MappingProxyType(
    {
        name: (level, tuple(field.rstrip("?") for field in fields.split()))
        for name, (level, fields) in _TABLE.items()
    }
)
# Those that each event of the name has.
_FIELDS: Final = {
    name: frozenset(field for field in fields.split() if not field.endswith("?"))
    for name, (_, fields) in _TABLE.items()
}

_LISTENER_QUEUE_MAX: Final = 1024
# Events that clients can cause at will, and the field that names the cause (never a client's text).
# Each cause is logged 30 times a minute; the rest is counted.
_CLIENT_CAUSED: Final[Mapping[str, str]] = MappingProxyType(
    {"request.rejected": "code", "upstream.failed": "phase"}
)
_CLIENT_CAUSED_MAX: Final = 30
_STYLES: Final = {"info": "dim", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True)
class Event:
    """An event: a name of EVENTS, the time in UTC, and the fields that EVENTS lists."""

    name: str
    at: datetime
    fields: Mapping[str, object]

    @property
    def level(self) -> Level:
        match self.name:
            case "instance.exited" if self.fields["fault"]:
                return "warning"
        return EVENTS[self.name][0]


class Emit(Protocol):
    """Emits an event; `fields` must be those that EVENTS lists for `name`."""

    def __call__(self, name: str, /, **fields: object) -> None: ...


class Part:
    """A part of the daemon; each method does nothing by default.

    Attributes:
        task: The name of its `serve` in the log and in `/metrics`, a constant of few words. The
            daemon does not serve a part without it.
        serves_until: When a shutdown cancels `serve`: before requests are drained, before engines
            are stopped, or at the end.
    """

    task = ""
    serves_until: Literal["drain", "stop", "end"] = "end"

    def observe(self, event: Event) -> None:
        """Take each event of the daemon at once; must not block."""

    async def serve(self) -> None:
        """Work until cancelled; restarted after an exception."""

    def metrics(self) -> Iterable[Metric]:
        """Return its part of `/metrics`, computed now."""
        return ()


class Listener:
    """A bounded queue of events. It drops the oldest when full and reports how many it dropped."""

    def __init__(self, queue_max: int = _LISTENER_QUEUE_MAX) -> None:
        self._events: deque[Event] = deque()
        self._queue_max = queue_max
        self._dropped = 0
        self._arrived = asyncio.Event()

    def push(self, event: Event) -> None:
        if len(self._events) >= self._queue_max:
            self._events.popleft()
            self._dropped += 1
        self._events.append(event)
        self._arrived.set()

    async def next(self) -> Event:
        """Wait for the next event, without a limit: an idle daemon emits nothing for days."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        if self._dropped:
            count, self._dropped = self._dropped, 0
            return Event("events.dropped", _now(), {"count": count})
        return self._events.popleft()


class EventStream:
    """Passes each event to sinks (the log) at once, and to listeners through bounded queues."""

    def __init__(self, *sinks: Callable[[Event], None]) -> None:
        self._sinks = sinks
        self._listeners: set[Listener] = set()
        self._throttle = Throttle(_CLIENT_CAUSED_MAX, self._report_withheld)

    def emit(self, name: str, /, **fields: object) -> None:
        self.report(name, fields)

    def report(self, name: str, fields: Mapping[str, object]) -> None:
        """Pass on an event; never blocks, and no sink or listener makes it fail.

        Nothing may change `fields` any more.
        """
        if not _FIELDS[name] <= fields.keys() <= {*EVENTS[name][1]}:
            raise ValueError(f"{name} takes the fields {EVENTS[name][1]}, not {tuple(fields)}")
        cause = _CLIENT_CAUSED.get(name)
        if cause and not self._throttle.admit((name, str(fields[cause]))):
            return
        event = Event(name, _now(), MappingProxyType(fields))
        for sink in self._sinks:
            with suppress(OSError, ValueError):  # a full disk, a closed stream
                sink(event)
        for listener in self._listeners:
            listener.push(event)

    def _report_withheld(self, cause: Hashable, count: int) -> None:
        event, reason = cause if isinstance(cause, tuple) else (str(cause), "")
        self.emit("events.withheld", event=event, cause=reason, count=count)

    def add_sink(self, sink: Callable[[Event], None]) -> None:
        """Pass each event also to `sink`, which must not block."""
        self._sinks = (*self._sinks, sink)

    @contextmanager
    def listen(self) -> Iterator[Listener]:
        """Receive every event until the block ends."""
        listener = Listener()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)


def describe(
    name: str, level: str, at: datetime, fields: Mapping[str, object], stream: TextIO = sys.stdout
) -> str:
    """Format an event for `output.write` to this stream, in local time."""
    time = f"{at.astimezone():%H:%M:%S}.{at.microsecond // 1000:03}"
    shown = colored(f"{name:19}", _STYLES[level], stream)
    return f"{time} {shown} {key_values(fields)}".rstrip()


def key_values(fields: Mapping[str, object]) -> str:
    """Format the fields that are not None as `key=value`, quoted if the value is not a word."""
    return " ".join(f"{key}={_word(value)}" for key, value in fields.items() if value is not None)


def _word(value: object) -> str:
    text = str(value)
    is_plain = text and text.isprintable() and not set(text) & {" ", '"'}
    return text if is_plain else json.dumps(text, ensure_ascii=not text.isprintable())


def _now() -> datetime:
    return datetime.now(tz=UTC)
