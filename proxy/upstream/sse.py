"""Server-sent events, cut out of a stream of bytes that comes in pieces of any size. No I/O.

An event is handed on as it came, with the blank line that ends it: put together again, the events
are the stream. What is kept while one is incomplete has a limit.

Source: WHATWG HTML, section "Parsing an event stream". llama-server (builds 10434 and 11434) ends
each event with two line feeds, writes one `data` line for each, and sends `:` as a keep-alive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, cast

import orjson

EVENT_MAX_BYTES: Final = 4 * 1024**2
DONE: Final = b"[DONE]"

_BLANK: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_FEEDS: Final = re.compile(rb"\n\n")
# The longest blank line, less the byte that completes it.
_OVERLAP_BYTES: Final = 3


class InvalidEvent(Exception):
    """The bytes are not the events that were asked for; the message says why."""


class Splitter:
    """Cuts one stream into events."""

    def __init__(self, max_bytes: int = EVENT_MAX_BYTES) -> None:
        """Begin.

        Args:
            max_bytes: Longest event taken, at least 1.
        """
        self._rest = b""
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes, return the events that are complete now.

        Raises:
            InvalidEvent: An event is longer than the limit.
        """
        seen = max(0, len(self._rest) - _OVERLAP_BYTES)
        stream = self._rest + chunk
        events: list[bytes] = []
        begin = 0
        blanks = _BLANK if b"\r" in stream else _FEEDS  # the plain one is five times as fast
        for blank in blanks.finditer(stream, seen):
            events.append(stream[begin : blank.end()])
            begin = blank.end()
        self._rest = stream[begin:]
        if len(stream) > self._max_bytes < max(len(self._rest), *map(len, events), 0):
            raise InvalidEvent(f"an event is longer than {self._max_bytes} bytes")
        return events

    def rest(self) -> bytes:
        """Return the bytes of the event that is not complete, and forget them."""
        rest, self._rest = self._rest, b""
        return rest


def data_of(event: bytes) -> bytes:
    """Return what an event says; empty where it says nothing, as a comment does."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]  # as an engine writes it: one line
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def members_of(event: bytes) -> Mapping[str, Any] | None:
    """Return the JSON object that an event carries, or None where it carries no object.

    Raises:
        InvalidEvent: What it carries is not JSON.
    """
    if event.startswith(b"data: {"):
        with suppress(orjson.JSONDecodeError):  # as an engine writes it: on one line
            return cast("dict[str, Any]", orjson.loads(event[6:]))
    data = data_of(event)
    if not data or data == DONE:
        return None
    try:
        said = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidEvent(f"an event is not JSON: {error}") from error
    return said if isinstance(said, dict) else None
