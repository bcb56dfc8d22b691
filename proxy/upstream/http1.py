"""Parses an HTTP/1.1 response: header, body without framing, server-sent events. No I/O.

Ambiguous input is rejected, and everything incomplete is bounded: a header to 64 KiB with interim
responses, a line of a chunked body to 4 KiB, trailers (dropped) to 64 KiB.

A stream of events comes in pieces of any size. Each event keeps its bytes and the blank line that
ends it, so the joined events are the stream.

Source: RFC 9112, sections 2.2, 4, 5, 6.3 and 7.1. WHATWG HTML, section "Parsing an event stream";
llama-server (builds 10434 and 11434) ends each event with two line feeds, writes one `data` line in
each, and sends `:` lines as pings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

EVENT_MAX_BYTES: Final = 4 * 1024**2
DONE: Final = b"[DONE]"

# A number: to look for bytes in bytes, Python first raises and drops a TypeError.
_CR: Final = 13
_DONE_END: Final = b"\n\ndata: [DONE]"
_BLANK: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
# The length of the longest blank line without its last byte.
_OVERLAP_BYTES: Final = 3


class InvalidEvent(Exception):
    """The bytes are not valid events, or not the expected ones."""


class Splitter:
    """Splits a stream into events of at most `EVENT_MAX_BYTES`."""

    def __init__(self) -> None:
        self.has_done = False  # Whether `objects` has read the end mark `[DONE]`.
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add the next bytes; return the events that they complete.

        Raises InvalidEvent: an event is longer than the limit.
        """
        seen = max(0, len(self._rest) - _OVERLAP_BYTES)
        stream = self._rest + chunk
        events: list[bytes] = []
        if _CR in stream:
            events = self._split_at_any_line_end(stream, seen)
        elif stream.find(b"\n\n", seen) < 0:
            self._rest = stream
        else:  # the engine's format; five times as fast as the regular expression
            *whole, self._rest = stream.split(b"\n\n")
            events = [event + b"\n\n" for event in whole]
        if len(stream) > EVENT_MAX_BYTES < max(len(self._rest), *map(len, events), 0):
            raise InvalidEvent(f"an event is longer than {EVENT_MAX_BYTES} bytes")
        return events

    def objects(self, chunk: bytes) -> list[Mapping[str, Any]]:
        """Add the next bytes; return the JSON objects in the events that they complete, in order.

        One call of the parser reads all events, if they are in the engine's format: on one line.

        Raises InvalidEvent: the data of an event is not JSON, or it is longer than the limit.
        """
        stream = self._rest + chunk
        if stream.startswith(b"data: {") and len(stream) <= EVENT_MAX_BYTES and _CR not in stream:
            if (end := stream.rfind(b"\n\n")) < 0:
                self._rest = stream
                return []
            text = stream[6:end]
            if is_done := text.endswith(_DONE_END):
                text = text[: -len(_DONE_END)]
            try:
                values: list[Any] = orjson.loads(b"[%b]" % text.replace(b"\n\ndata: ", b","))
            except orjson.JSONDecodeError:
                pass  # an event has several lines, or is not JSON
            else:
                self._rest, self.has_done = stream[end + 2 :], is_done or self.has_done
                return [value for value in values if isinstance(value, dict)]
        events = self.feed(chunk)
        self.has_done = self.has_done or any(data_of(event) == DONE for event in events)
        return [members for event in events if (members := members_of(event)) is not None]

    def add(self, chunk: bytes) -> None:
        """Add the next bytes, for `take_event`; raises InvalidEvent as `feed`."""
        self._rest += chunk
        if len(self._rest) > EVENT_MAX_BYTES:
            held, self._rest = self._rest, b""
            self._rest = b"".join(self.feed(held)) + self._rest

    def take_event(self) -> bytes:
        """Remove and return the first event; empty if none is complete."""
        end = self._rest.find(b"\n\n") + 2
        if _CR in self._rest:
            blank = _BLANK.search(self._rest)
            end = blank.end() if blank else 0
        elif end < 2:
            return b""
        event, self._rest = self._rest[:end], self._rest[end:]
        return event

    @property
    def is_between(self) -> bool:
        """Whether the bytes so far end with an event."""
        return not self._rest

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
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and _CR not in event:
        return event[6:-2]  # the engine's format: one line
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def members_of(event: bytes) -> Mapping[str, Any] | None:
    """Return the JSON object in an event; None if it has other JSON, `[DONE]` or no data.

    Raises InvalidEvent: its data is not JSON.
    """
    if event.startswith(b"data: {"):
        try:  # the engine's format: on one line
            members: dict[str, Any] = orjson.loads(event[6:])
        except orjson.JSONDecodeError:
            pass  # on several lines
        else:
            return members
    data = data_of(event)
    if not data or data == DONE:
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidEvent(f"an event is not JSON: {error}") from error
    return value if isinstance(value, dict) else None


_HEAD_MAX_BYTES: Final = 64 * 1024
_LINE_MAX_BYTES: Final = 4 * 1024
_WITH_END_BYTES: Final = _LINE_MAX_BYTES + 2

_BEGINNING: Final = b"HTTP/1."
_STATUS_LINE: Final = re.compile(r"HTTP/1\.[01] ([1-5]\d\d)(?: .*)?", re.ASCII)
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_CHUNKED: Final = -1
_TO_END: Final = -2
# The next line of a chunked body.
_SIZE: Final = 0
_END: Final = 1
_TRAILER: Final = 2
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")


NO_HEADERS: Final[CIMultiDictProxy[str]] = CIMultiDictProxy(CIMultiDict())


class InvalidResponse(Exception):
    """The bytes are not a valid HTTP response."""


class Response:
    def __init__(self, method: str) -> None:
        self.status = 0  # 0 until the header is complete.
        self.headers = NO_HEADERS
        self.is_over = False  # Whether the body is complete; later bytes are ignored.
        self._method = method
        self._framing = 0
        self._expects = _SIZE
        self._rest = b""
        self._spent_bytes = 0
        self._left_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Return the body's part of the next bytes. Raises InvalidResponse."""
        if not self.status:
            data = self._take_head(data)
            if not self.status:
                return b""
        if self._framing == _CHUNKED:
            return self._take_chunks(data)
        if self._framing == _TO_END:
            return data
        body = data[: self._left_bytes]
        self._left_bytes -= len(body)
        self.is_over = not self._left_bytes
        return body

    def whole_chunk(self, data: bytes) -> bytes:
        """Return the content of the next bytes if they are one chunk in its usual form.

        A token nearly always comes so. Otherwise returns nothing and has done nothing.
        """
        if self._framing == _CHUNKED and not (self._expects or self._left_bytes or self._rest):
            line, _, rest = data.partition(b"\r\n")
            if line == _size_line(len(rest) - 2) and rest[-2:] == b"\r\n":
                return rest[:-2]
        return b""

    def end(self) -> bool:
        """Note the end of the connection; return whether the response is complete."""
        if self.status and self._framing == _TO_END:
            self.is_over = True
        return self.is_over

    def _take_head(self, data: bytes) -> bytes:
        """Return the bytes after the header, if it is complete."""
        data, status, framing = self._rest + data, 0, 0
        while status < 200:  # an interim response: the real one is still to come
            if not data.startswith(_BEGINNING[: len(data)]):
                raise InvalidResponse(f"it begins with {data[:20]!r}")
            head, mark, after = data.partition(b"\r\n\r\n")
            if self._spent_bytes + len(head) > _HEAD_MAX_BYTES:
                raise InvalidResponse(f"its header is larger than {_HEAD_MAX_BYTES} bytes")
            if not mark:
                self._rest = data
                return b""
            self._spent_bytes += len(head)
            status, self.headers, framing = _read_head(head, is_head=self._method == "HEAD")
            data = after
        self._rest, self._spent_bytes = b"", 0
        self.status, self._framing, self._left_bytes = status, framing, max(0, framing)
        return data

    def _take_chunks(self, data: bytes) -> bytes:
        data, self._rest = self._rest + data, b""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        while at < size and not self.is_over:
            if self._left_bytes:
                piece = data[at : at + self._left_bytes]
                self._left_bytes -= len(piece)
                at += len(piece)
                pieces.append(piece)
                continue
            end = data.find(b"\r\n", at, at + _WITH_END_BYTES)
            if end < 0:
                if size - at > _LINE_MAX_BYTES:
                    raise InvalidResponse(
                        f"a line of its framing is longer than {_LINE_MAX_BYTES} bytes"
                    )
                self._rest = data[at:]
                break
            if self._expects:
                self._take_line(data[at:end])
                at = end + 2
                continue
            left, at = _chunk_bytes(data[at:end]), end + 2
            while left and data.startswith(b"\r\n", stop := at + left):  # all of the chunk is here
                pieces.append(data[at:stop])
                at = stop + 2
                if at == size or (end := data.find(b"\r\n", at, at + _WITH_END_BYTES)) < 0:
                    break
                left, at = _chunk_bytes(data[at:end]), end + 2
            else:
                self._left_bytes, self._expects = left, _END if left else _TRAILER
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _take_line(self, line: bytes) -> None:
        """Read the end of a chunk, or a line of the trailer."""
        if self._expects == _END:
            if line:
                raise InvalidResponse(f"a chunk is longer than its size: {line[:40]!r}")
            self._expects = _SIZE
            return
        self._spent_bytes += len(line)
        if self._spent_bytes > _HEAD_MAX_BYTES:
            raise InvalidResponse(f"its trailer is larger than {_HEAD_MAX_BYTES} bytes")
        self.is_over = not line


@lru_cache(maxsize=512)
def _size_line(size_bytes: int) -> bytes:
    return b"%x" % size_bytes


@lru_cache(maxsize=64)
def _chunk_bytes(line: bytes) -> int:
    size = _CHUNK_SIZE.fullmatch(line)
    if not size:
        raise InvalidResponse(f"a chunk begins with {line[:40]!r}")
    return int(size[1], 16)


# An engine begins every stream with the same bytes.
@lru_cache(maxsize=32)
def _read_head(head: bytes, *, is_head: bool) -> tuple[int, CIMultiDictProxy[str], int]:
    """Return the status, the fields and the length of the body: a number, _CHUNKED or _TO_END."""
    first, *lines = head.decode("utf-8", "replace").split("\r\n")
    status_line = _STATUS_LINE.fullmatch(first)
    if not status_line:
        raise InvalidResponse(f"its status line is {first[:40]!r}")
    status = int(status_line[1])
    if status == 101:
        raise InvalidResponse("it switches to another protocol, which was not requested")
    headers = CIMultiDictProxy(CIMultiDict([_field(line) for line in lines]))
    has_no_body = is_head or status in {204, 304}
    return status, headers, 0 if status < 200 else _framing(headers, has_no_body=has_no_body)


def _framing(headers: CIMultiDictProxy[str], *, has_no_body: bool) -> int:
    """Return the length of the body. The rules are in the order of RFC 9112, section 6.3."""
    encodings = headers.getall("Transfer-Encoding", ())
    lengths = set(headers.getall("Content-Length", ()))
    if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise InvalidResponse(f"its Content-Length is {', '.join(sorted(lengths))[:40]!r}")
    if has_no_body:
        return 0
    if encodings:
        if lengths or [word.lower() for word in encodings] != ["chunked"]:
            raise InvalidResponse("its Transfer-Encoding is not just chunked")
        return _CHUNKED
    return int(lengths.pop()) if lengths else _TO_END


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    if not _NAME.fullmatch(name) or _CONTROL.search(value):
        raise InvalidResponse(f"a field of its header is {line[:40]!r}")
    return name, value.strip(" \t")
