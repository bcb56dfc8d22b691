"""The event stream as a log: pretty on a terminal, for the journal under systemd, JSON elsewhere.

    terminal    2026-11-21T09:00:00.000+00:00 [info] instance.state_changed  instance=chat.0 …
    journal     <6>instance.state_changed instance=chat.0 …
    elsewhere   {"timestamp":"2026-11-21T09:00:00.000+00:00","level":"info","event":…}

The journal keeps its own time and takes a line's priority from its prefix; everything else needs
both in the line. structlog is imported for a terminal only: a daemon in the background has no use
for its 6 MB and third of a second.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TextIO

from supervisor.events import Event, Level
from supervisor.output import one_line, wants_colour
from supervisor.output import to_json as as_json

# Load progress is for whoever watches a start; a log would drown in it.
_QUIET: Final = frozenset({"instance.load_progress"})

# Source: sd-daemon(3), SD_ERR, SD_WARNING and SD_INFO.
_PRIORITIES: Final[Mapping[Level, int]] = MappingProxyType({"error": 3, "warning": 4, "info": 6})

Sink = Callable[[Event], None]
Write = Callable[[str], None]


def to_stream(stream: TextIO, environ: Mapping[str, str] = os.environ) -> Sink:
    """Return a sink that writes each event to a stream as one line, as suits who reads it."""

    def write(line: str) -> None:
        stream.write(line)
        stream.flush()

    if is_journal(stream, environ):
        return to_journal(write)
    if stream.isatty():
        return to_terminal(write, colours=wants_colour(stream))
    return to_json(write)


def to_terminal(write: Write, *, colours: bool) -> Sink:
    """Return a sink that writes each event as a person likes to read it."""
    import structlog  # noqa: PLC0415 (see the module's docstring)

    renderer = structlog.dev.ConsoleRenderer(colors=colours)
    return _sink(write, lambda event: str(renderer(None, event.level, _visible(_entry(event)))))


def to_json(write: Write) -> Sink:
    """Return a sink that writes each event as one line of JSON."""
    return _sink(write, lambda event: as_json(_entry(event)))


def to_journal(write: Write) -> Sink:
    """Return a sink that writes each event as one line for the systemd journal."""
    return _sink(
        write,
        lambda event: f"<{_PRIORITIES[event.level]}>{event.name} {words(event.fields)}".rstrip(),
    )


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Tell whether a stream goes to the systemd journal itself, not merely near it.

    A child inherits the variable with its parent's environment, but not always the stream, which is
    why device and inode are compared. Source: systemd.exec(5), JOURNAL_STREAM.
    """
    named = environ.get("JOURNAL_STREAM", "")
    if not named:
        return False
    try:
        found = os.fstat(stream.fileno())
    except OSError:
        return False
    return named == f"{found.st_dev}:{found.st_ino}"


def words(fields: Mapping[str, object]) -> str:
    """Return the fields that are known as `key=value`, quoted where that is no plain word."""
    return " ".join(f"{key}={_word(value)}" for key, value in _known(fields).items())


def _word(value: object) -> str:
    text = str(value)
    is_plain = text and text.isprintable() and not set(text) & {" ", '"'}
    return text if is_plain else json.dumps(text, ensure_ascii=not text.isprintable())


def _sink(write: Write, render: Callable[[Event], str]) -> Sink:
    def hear(event: Event) -> None:
        if event.name not in _QUIET:
            write(f"{render(event)}\n")

    return hear


def _entry(event: Event) -> dict[str, object]:
    at = event.at.isoformat(timespec="milliseconds")
    return {"timestamp": at, "level": event.level, "event": event.name, **_known(event.fields)}


def _visible(entry: Mapping[str, object]) -> dict[str, object]:
    """Return an entry with its values as a terminal may be shown them, in one line."""
    return {key: _shown(value) for key, value in entry.items()}


def _shown(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    return one_line(str(value))


def _known(fields: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in fields.items() if value is not None}
