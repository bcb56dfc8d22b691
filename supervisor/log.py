"""Writes events to the daemon's log, in the format that suits the stream.

    terminal    09:00:00.000 instance.state_changed instance=chat.0 …     as `corral events`
    journal     an entry with fields (`journalctl CORRAL_MODEL=chat`); if the journal rejects it:
                <6>instance.state_changed instance=chat.0 …               the journal adds the time
    file, pipe  {"timestamp":"2026-11-21T09:00:00.000+00:00","level":"info","event":…}

Records of `logging` (aiohttp, asyncio) arrive as `task.failed` events: FailureHandler counts
and throttles them first, so that no library fills the log.

Source: systemd.io, "Native Journal Protocol"; systemd.journal-fields(7).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final, TextIO

from supervisor.events import LOAD_PROGRESS, Event, describe, key_values
from supervisor.output import to_json, write


@contextmanager
def hide_module(name: str) -> Iterator[None]:
    """Make imports of a package fail as if it were not installed, unless it is loaded already.

    Source: Python's reference, 5.3.1: `None` in `sys.modules` raises ModuleNotFoundError.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # documented, and not in typeshed
    try:
        yield
    finally:
        del sys.modules[name]


JOURNAL_SOCKET: Final = Path("/run/systemd/journal/socket")
# Source: sd-daemon(3), SD_ERR, SD_WARNING and SD_INFO.
PRIORITIES: Final[Mapping[str, int]] = MappingProxyType({"error": 3, "warning": 4, "info": 6})
_IDENTIFIER: Final = "llama-corral"
# An entry is one datagram, and the kernel takes 208 KiB. Source: socket(7), wmem_default.
_VALUE_MAX_BYTES: Final = 8 * 1024
_SEND_TIMEOUT_S: Final = 0.1


def message_of(event: Event) -> str:
    return f"{event.name} {key_values(event.fields)}".rstrip()


def journal_entry(event: Event) -> bytes:
    """Encode an event for the journal; its field `model` becomes CORRAL_MODEL.

    The length of each value is in front of it, so a value cannot add a field.
    """
    entry = b""
    for name, value in _fields(event):
        data = value.encode(errors="backslashreplace")[:_VALUE_MAX_BYTES]
        entry += name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
    return entry


def send_to_journal(entry: bytes, journal: Path = JOURNAL_SOCKET) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(_SEND_TIMEOUT_S)
            channel.sendto(entry, str(journal))
    except OSError:
        return False
    return True


def _fields(event: Event) -> Iterator[tuple[str, str]]:
    yield "MESSAGE", message_of(event)
    yield "PRIORITY", str(PRIORITIES[event.level])
    yield "SYSLOG_IDENTIFIER", _IDENTIFIER
    yield "CORRAL_EVENT", event.name
    for name, value in event.fields.items():
        if value is not None and name != "event":
            yield f"CORRAL_{name.upper()}", str(value)


# structlog needs them only for its own console and for greenlets, which we do not use. They would
# take 3 MB of memory if installed.
with hide_module("rich"), hide_module("colorama"), hide_module("greenlet"):
    import structlog
    from structlog.typing import EventDict, Processor, WrappedLogger

Sink = Callable[[Event], None]
WriteLine = Callable[[str], None]


def stream_sink(
    stream: TextIO, environ: Mapping[str, str] = os.environ, journal: Path = JOURNAL_SOCKET
) -> Sink:
    """Return a sink in the format that suits the stream: journal, terminal, or file."""

    def write_line(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    if is_journal(stream, environ):
        return native_journal_sink(journal, journal_sink(write_line))
    if stream.isatty():
        return console_sink(stream)
    return json_sink(write_line)


def console_sink(stream: TextIO) -> Sink:
    def to_console(_: WrappedLogger, level: str, entry: EventDict) -> str:
        return describe(entry["event"], level, entry["at"], entry["fields"], stream)

    return _sink(lambda line: write(line, stream), to_console)


def json_sink(write_line: WriteLine) -> Sink:
    renderer = structlog.processors.JSONRenderer(lambda entry, **_: to_json(entry))
    return _sink(write_line, _flatten, renderer)


def native_journal_sink(journal: Path, otherwise: Sink) -> Sink:
    def log(event: Event) -> None:
        is_sent = event.name == LOAD_PROGRESS or send_to_journal(journal_entry(event), journal)
        if not is_sent:
            otherwise(event)

    return log


def journal_sink(write_line: WriteLine) -> Sink:
    def to_journal(_: WrappedLogger, level: str, entry: EventDict) -> str:
        return f"<{PRIORITIES[level]}>{entry['event']} {key_values(entry['fields'])}".rstrip()

    return _sink(write_line, to_journal)


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


class _Lines:
    """A logger for structlog: one method per level."""

    def __init__(self, write_line: WriteLine) -> None:
        self.info = self.warning = self.error = write_line


def _sink(write_line: WriteLine, *processors: Processor) -> Sink:
    logger = structlog.wrap_logger(
        _Lines(write_line), processors, structlog.BoundLogger, cache_logger_on_first_use=True
    )

    def log(event: Event) -> None:
        if event.name != LOAD_PROGRESS:  # only for commands that watch a start; too many for a log
            getattr(logger, event.level)(event.name, at=event.at, fields=event.fields)

    return log


def _flatten(_: WrappedLogger, level: str, entry: EventDict) -> EventDict:
    own = {
        "timestamp": entry["at"].isoformat(timespec="milliseconds"),
        "level": level,
        "event": entry["event"],
    }
    known = {key: value for key, value in entry["fields"].items() if value is not None}
    return own | {f"field_{key}" if key in own else key: known[key] for key in known}
