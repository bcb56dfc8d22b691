"""The daemon's events: their table, and the stream to the log and to `corral events`.

A test compares the table with the code. Names are `noun.past_verb`; fields carry units. No field
holds a prompt or a secret.
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
from supervisor.output import colored

if TYPE_CHECKING:  # most commands need no metrics
    from prometheus_client import Metric

Level = Literal["info", "warning", "error"]

LOAD_PROGRESS: Final = "instance.load_progress"
DAEMON_STOPPED: Final = "daemon.stopped"

# Name → level and fields.
_TABLE: Final[Mapping[str, tuple[Level, str]]] = {
    "daemon.open": ("warning", "keyless hint"),
    "daemon.started": ("info", "version url control settings"),
    "daemon.stopping": ("info", "reason"),
    "daemon.stopped": ("info", "duration_s"),
    "instance.state_changed": ("info", "instance model before after run reason"),
    "instance.load_progress": ("info", "instance model run stage value"),
    "instance.withdrawn": ("info", "instance model run in_flight"),
    "instance.drained": ("info", "instance model run"),
    "instance.requests_aborted": ("warning", "instance model run in_flight"),
    "instance.exit_requested": ("info", "instance model run how"),
    "instance.exited": ("info", "instance model run code signal up_s fault"),
    "instance.speed_measured": (
        "info",
        "instance model run threads decode_tps prefill_tps together_tps",
    ),
    "instance.failed": ("error", "instance model failures code reason hint log"),
    "model.unloaded": ("info", "model reason"),
    "model.load_refused": ("warning", "model reason"),
    "model.adapted": ("info", "model key before after reason"),
    "model.reduced": ("warning", "model key before after reason"),
    "model.restored": ("info", "model reason"),
    "model.adapt_failed": ("warning", "model key before after reason retry_in_s"),
    "slots.saved": ("info", "instance model run slots tokens size_bytes duration_ms"),
    "slots.restored": ("info", "instance model run slots tokens size_bytes duration_ms"),
    "slots.save_failed": ("warning", "instance model run reason"),
    "slots.restore_failed": ("warning", "instance model run reason"),
    "slots.disk_full": ("warning", "reason"),
    "slots.saving_paused": ("warning", "reason retry_in_s"),
    "slots.files_missing": ("info", "files"),
    "slots.quarantined": ("warning", "model file reason"),
    "slots.key_unusable": ("warning", "reason"),
    "slots.key_missing": ("warning", "files keys"),
    "slots.restore_unused": ("warning", "instance model expected cached"),
    "prompt.prefilled": ("info", "instance model run prompt tokens cached"),
    "next_turn.computed": ("info", "instance model tokens computed duration_ms"),
    "prefix.saved": ("info", "instance model tokens cached size_bytes"),
    "prompt.stored": ("info", "model prompt tokens"),
    "prompt.store_failed": ("warning", "model reason"),
    "prompt.rejected": ("warning", "instance model run prompt reason"),
    "capture.started": ("info", "model duration_s size_bytes requests"),
    "capture.ended": ("info", "model reason requests responses dropped size_bytes"),
    "canary.started": ("info", "model engine share decides_in_s"),
    "canary.promoted": ("info", "model engine reason"),
    "canary.withdrawn": ("warning", "model engine reason"),
    "canary.promotion_refused": ("warning", "model reason"),
    "settings.reloaded": ("info", "added removed changed kept notes"),
    "settings.rejected": ("warning", "reason"),
    "engine.orphan_killed": ("warning", "instance pid since"),
    "host.joined": ("info", "host hosts"),
    "host.left": ("info", "host hosts"),
    "worker.ready": ("info", "worker address pid devices"),
    "worker.exited": ("warning", "worker code signal up_s reason retry_in_s"),
    "worker.failed": ("error", "worker reason hint log"),
    "worker.lost": ("warning", "model reason"),
    "node.up": ("info", "node models"),
    "node.load_requested": ("info", "node model"),
    "node.load_refused": ("warning", "node model reason"),
    "node.down": ("warning", "node reason"),
    "node.draining": ("info", "node"),
    "node.resolved": ("info", "node added removed addresses"),
    "node.unresolved": ("warning", "node reason"),
    "node.not_announced": ("warning", "reason"),
    "traces.export_failed": ("warning", "reason"),
    "traces.export_resumed": ("info", "lost"),
    "hook.finished": ("info", "hook model node command duration_s output"),
    "hook.failed": ("warning", "hook model node command reason duration_s output"),
    "hooks.dropped": ("warning", "hook count"),
    "request.finished": (
        "info",
        (
            "request client path model fallback_for instance slot kind streamed priority "
            "conversation diverted status code cancelled attempts continued tool_calls yields "
            "duration_ms queued_ms evict_ms load_ms slots_ms prefill_ms decode_ms paused_ms "
            "stalled_ms other_ms first_byte_ms first_token_ms bytes_out expected_cached_tokens "
            "cached_tokens prompt_tokens decoded_tokens engine_prefill_ms engine_decode_ms "
            "drafted_tokens accepted_tokens rules cache_cause cache_tier cache"
        ),
    ),
    "batch.ended": ("info", "batch status total completed failed"),
    "batches.paused": ("warning", "reason"),
    "batches.resumed": ("info", ""),
    "requests.record_failed": ("warning", "reason"),
    "history.write_failed": ("warning", "reason"),
    "history.replaced": ("warning", "reason kept"),
    "usage.record_failed": ("warning", "reason"),
    "request.rejected": (
        "warning",
        (
            "request client path model status code reason cancelled duration_ms queued_ms evict_ms "
            "load_ms slots_ms prefill_ms decode_ms paused_ms stalled_ms other_ms"
        ),
    ),
    "upstream.failed": ("warning", "request model instance phase error"),
    "task.failed": ("error", "task error traceback more"),
    "events.withheld": ("warning", "event cause count"),
    "events.dropped": ("warning", "count"),
}
EVENTS: Final[Mapping[str, tuple[Level, tuple[str, ...]]]] = MappingProxyType(
    {name: (level, tuple(fields.split())) for name, (level, fields) in _TABLE.items()}
)
_FIELDS: Final = {name: frozenset(fields) for name, (_, fields) in EVENTS.items()}

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
        if fields.keys() != _FIELDS[name]:
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
