"""The daemon's log: one line for each event, in the format for what it is written to.

    terminal    09:00:00.000 instance.state_changed instance=chat.0 …     as `corral events`
    journal     <6>instance.state_changed instance=chat.0 …               the journal adds the time
    elsewhere   {"timestamp":"2026-11-21T09:00:00.000+00:00","level":"info","event":…}

Records of `logging` (aiohttp, asyncio) arrive as `task.failed` events: FailureHandler counts
and throttles them first, so that no library fills the log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TextIO

from supervisor.events import LOAD_PROGRESS, Event, describe, key_values
from supervisor.output import to_json, write

# Source: sd-daemon(3), SD_ERR, SD_WARNING and SD_INFO.
_PRIORITIES: Final[Mapping[str, int]] = MappingProxyType({"error": 3, "warning": 4, "info": 6})

Sink = Callable[[Event], None]
WriteLine = Callable[[str], None]


def stream_sink(stream: TextIO, environ: Mapping[str, str] = os.environ) -> Sink:
    """Log to a stream in the format for what it is: the journal, a terminal, or a file."""

    def write_line(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    if is_journal(stream, environ):
        return journal_sink(write_line)
    if stream.isatty():
        return console_sink(stream)
    return json_sink(write_line)


def console_sink(stream: TextIO) -> Sink:
    def line_of(event: Event) -> str:
        return describe(event.name, event.level, event.at, event.fields, stream)

    return _sink(lambda line: write(line, stream), line_of)


def json_sink(write_line: WriteLine) -> Sink:
    return _sink(write_line, lambda event: to_json(_members(event)))


def journal_sink(write_line: WriteLine) -> Sink:
    return _sink(write_line, _journal_line)


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether a stream is the systemd journal.

    A child inherits JOURNAL_STREAM with its parent's environment, but not always the stream, so
    device and inode are compared. Source: systemd.exec(5), JOURNAL_STREAM.
    """
    named = environ.get("JOURNAL_STREAM", "")
    if not named:
        return False
    try:
        found = os.fstat(stream.fileno())
    except OSError:
        return False
    return named == f"{found.st_dev}:{found.st_ino}"


def _sink(write_line: WriteLine, line_of: Callable[[Event], str]) -> Sink:
    def log(event: Event) -> None:
        if event.name != LOAD_PROGRESS:  # for clients that watch a start; too many for a log
            write_line(line_of(event))

    return log


def _members(event: Event) -> dict[str, object]:
    own: dict[str, object] = {
        "timestamp": event.at.isoformat(timespec="milliseconds"),
        "level": event.level,
        "event": event.name,
    }
    known = {key: value for key, value in event.fields.items() if value is not None}
    return own | {f"field_{key}" if key in own else key: known[key] for key in known}


def _journal_line(event: Event) -> str:
    return f"<{_PRIORITIES[event.level]}>{event.name} {key_values(event.fields)}".rstrip()
