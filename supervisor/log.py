"""The event stream as a log: pretty on a terminal, JSON elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TextIO

import structlog

from supervisor.events import Event
from supervisor.show import wants_colour

# Load progress is for whoever watches a start; a log would drown in it.
_QUIET: Final = frozenset({"instance.progressed"})

Sink = Callable[[Event], None]


def to_stream(stream: TextIO) -> Sink:
    """Return a sink that writes each event to a stream as one line."""

    def write(line: str) -> None:
        stream.write(line)
        stream.flush()

    if not stream.isatty():
        return to_json(write)
    return _sink(write, structlog.dev.ConsoleRenderer(colors=wants_colour(stream)))


def to_json(write: Callable[[str], None]) -> Sink:
    """Return a sink that writes each event as one line of JSON."""
    return _sink(write, structlog.processors.JSONRenderer(default=str))


def _sink(write: Callable[[str], None], render: structlog.typing.Processor) -> Sink:
    def hear(event: Event) -> None:
        if event.name not in _QUIET:
            line = render(None, event.level, _entry(event))
            write(f"{line!s}\n")

    return hear


def _entry(event: Event) -> structlog.typing.EventDict:
    """Return what a renderer of structlog takes; what is unknown is left out."""
    known = {key: value for key, value in event.fields.items() if value is not None}
    at = event.at.isoformat(timespec="milliseconds")
    return {"timestamp": at, "level": event.level, "event": event.name, **known}
