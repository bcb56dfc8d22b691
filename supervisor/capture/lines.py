"""The lines of a capture: JSON objects, as docs/capture.md describes them. Pure.

`encoded` takes as long as its body is large: a thread calls it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import orjson

from proxy.request import ProxyRequest
from proxy.upstream.timings import Timings
from supervisor.capture.redaction import kept_headers, kept_query, without_keys

FORMAT: Final = 1


class Line(Protocol):
    def encoded(self) -> bytes:
        """Return the line with its newline."""


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request as an instance gets it: variants are applied; `at_ms` since the capture began."""

    number: int
    at_ms: float
    request: ProxyRequest

    def encoded(self) -> bytes:
        one = self.request
        return line(
            "request",
            n=self.number,
            at_ms=self.at_ms,
            id=one.request_id,
            kind=one.kind.name.lower(),
            priority=one.priority,
            method=one.method,
            path=one.path,
            query=kept_query(one.query),
            headers=kept_headers(one.headers),
            body=None if one.form else without_keys(_parsed(one.body)),
            omitted=f"a form of {len(one.body)} bytes" if one.form else None,
        )


@dataclass(frozen=True, slots=True)
class ResponseLine:
    """A response as the client got it; times are of the capture.

    Attributes:
        status: None where none was sent.
        chunks: Pieces of the body, each with the time at which it was passed on.
        end_ms: When it was complete, or ended in `failure`.
        first_token_ms: Since the request arrived; None where there was none.
        times_ms: How long each phase took, as in `request.finished`.
    """

    number: int
    status: int | None
    content_type: str
    chunks: Sequence[tuple[float, bytes]]
    end_ms: float
    instance: str | None
    slot: int | None
    timings: Timings | None
    first_token_ms: float | None
    times_ms: Mapping[str, float]
    failure: str | None

    def encoded(self) -> bytes:
        return line(
            "response",
            n=self.number,
            status=self.status,
            content_type=self.content_type,
            end_ms=self.end_ms,
            instance=self.instance,
            slot=self.slot,
            first_token_ms=self.first_token_ms,
            times_ms=self.times_ms,
            timings=asdict(self.timings) if self.timings else None,
            failure=self.failure,
            chunks=list(_texts(self.chunks)),
        )


def header_line(members: Mapping[str, Any]) -> bytes:
    return line("capture", format=FORMAT, **members)


def line(name: str, /, **members: Any) -> bytes:
    return orjson.dumps({"type": name, **members}, option=orjson.OPT_APPEND_NEWLINE)


def _parsed(body: bytes) -> Any:
    return orjson.loads(body) if body else None


def _texts(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Yield the chunks as texts; half a letter at the end of one goes to the next."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for at_ms, chunk in chunks:
        if text := decoder.decode(chunk):
            yield at_ms, text
    if rest := decoder.decode(b"", final=True):
        yield chunks[-1][0], rest
