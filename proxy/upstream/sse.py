"""Splits a byte stream, received in pieces of any size, into server-sent events. No I/O.

Each event keeps its bytes and the blank line that ends it, so the joined events are the stream.

Source: WHATWG HTML, section "Parsing an event stream". llama-server (builds 10434 and 11434) ends
each event with two line feeds, writes one `data` line in each, and sends `:` lines as pings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import orjson

EVENT_MAX_BYTES: Final = 4 * 1024**2
DONE: Final = b"[DONE]"

_DONE_EVENT: Final = b"data: [DONE]\n\n"
_BLANK: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
# The length of the longest blank line without its last byte.
_OVERLAP_BYTES: Final = 3


class InvalidEvent(Exception):
    """The bytes are not valid events, or not the expected ones."""


class Splitter:
    """Splits a stream into events of at most `max_bytes`."""

    def __init__(self, max_bytes: int = EVENT_MAX_BYTES) -> None:
        self._rest = b""
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add the next bytes; return the events that they complete.

        Raises:
            InvalidEvent: An event is longer than the limit.
        """
        seen = max(0, len(self._rest) - _OVERLAP_BYTES)
        stream = self._rest + chunk
        events: list[bytes] = []
        if b"\r" in stream:
            events = self._split_at_any_line_end(stream, seen)
        elif stream.find(b"\n\n", seen) < 0:
            self._rest = stream
        else:  # the engine's format; five times as fast as the regular expression
            *whole, self._rest = stream.split(b"\n\n")
            events = [event + b"\n\n" for event in whole]
        if len(stream) > self._max_bytes < max(len(self._rest), *map(len, events), 0):
            raise InvalidEvent(f"an event is longer than {self._max_bytes} bytes")
        return events

    def take_rest(self) -> bytes:
        """Remove and return the bytes of the incomplete event."""
        rest, self._rest = self._rest, b""
        return rest

    def _split_at_any_line_end(self, stream: bytes, seen: int) -> list[bytes]:
        events: list[bytes] = []
        start = 0
        for blank in _BLANK.finditer(stream, seen):
            events.append(stream[start : blank.end()])
            start = blank.end()
        self._rest = stream[start:]
        return events


def data_of(event: bytes) -> bytes:
    """Return the data of an event; empty if it has none, like a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]  # the engine's format: one line
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def members_of(event: bytes) -> Mapping[str, Any] | None:
    """Return the JSON object in an event; None if it has other JSON, `[DONE]` or no data.

    Raises:
        InvalidEvent: Its data is not JSON.
    """
    if event.startswith(b"data: {"):
        try:  # the engine's format: on one line
            return cast("dict[str, Any]", orjson.loads(event[6:]))
        except orjson.JSONDecodeError:
            pass  # on several lines
    data = data_of(event)
    if not data or data == DONE:
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidEvent(f"an event is not JSON: {error}") from error
    return value if isinstance(value, dict) else None


def has_done(events: Iterable[bytes]) -> bool:
    return any(
        event == _DONE_EVENT or data_of(event) == DONE
        for event in events
        if not event.startswith(b"data: {")
    )


def objects_of(events: Sequence[bytes]) -> list[Mapping[str, Any]]:
    """Return the JSON objects in events, in order; one parser call for events in engines' format.

    Raises:
        InvalidEvent: The data of an event is not JSON.
    """
    with_data = [event for event in events if event != _DONE_EVENT]
    texts = [event[6:-2] for event in with_data if event.startswith(b"data: {")]
    if len(texts) == len(with_data):
        with suppress(orjson.JSONDecodeError):  # an event has several lines, or is not JSON
            return [
                value
                for value in orjson.loads(b"[%b]" % b",".join(texts))
                if isinstance(value, dict)
            ]
    return [members for event in events if (members := members_of(event)) is not None]
