"""Shows how a request was served: to its client as an explanation, to a running capture as bytes.

If a header asks for the explanation, a whole response gets it as the member `corral`; a stream of
OpenAI's completions as one more chunk, with no choices, before `[DONE]`; other streams as the
member in their last event.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import orjson
from multidict import CIMultiDict

from proxy.common.headers import SLOT
from proxy.forward.response import EventTransform, StreamTransform
from proxy.http.api_formats import data_event
from proxy.observe.explanation import explain, own_figures
from proxy.observe.record import AccessRecord
from proxy.request.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.upstream.http1 import DONE, members_of

MEMBER: Final = "corral"
_END: Final = b"\n\n"
# The last event of a stream of OpenAI's completions, Anthropic's messages, OpenAI's responses and
# llama-server's own completion. Quotes within texts are escaped.
_LAST: Final = re.compile(
    rb'^data: \[DONE\]|^event: (?:message_stop|response\.(?:completed|incomplete))|"stop":true',
    re.MULTILINE,
)
_IN_ALL_CHUNKS: Final = ("id", "object", "created", "model", "system_fingerprint")


class Explained(EventTransform):
    too_long = "is too long to be explained"

    def __init__(self, record: AccessRecord) -> None:
        super().__init__()
        self._record = record
        self._lease: Lease | None = None
        self._last = b""  # the last event, and the bytes after it
        self._passed = b""  # the event before it

    def note_lease(self, lease: Lease) -> None:
        self._lease = lease

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:  # noqa: ARG002 (of any status)
        number = self._lease.slot_number if self._lease else None
        if number is not None:
            headers[SLOT] = str(number)

    def event(self, event: bytes) -> bytes:
        """Return an event before the last one."""
        if self._last or _LAST.search(event):
            self._last += event
            return b""
        self._passed = event
        return event

    def end(self) -> bytes:
        """Return the last event with the explanation; an incomplete end stays unchanged."""
        held = self._last + self._splitter.take_rest()
        event, end, rest = held.partition(_END)
        if DONE in event:
            passed = members_of(self._passed) or {}
            shared = {name: passed[name] for name in _IN_ALL_CHUNKS if name in passed}
            chunk = {"choices": [], **shared, MEMBER: self._explanation()}
            return data_event(chunk) + held
        if not event.endswith(b"}"):
            return held
        return event[:-1] + b"," + orjson.dumps({MEMBER: self._explanation()})[1:] + end + rest

    def whole(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 (of any status)
        """Add the explanation to a JSON object; other bodies stay unchanged."""
        whole = body.rstrip()
        if not (whole.startswith(b"{") and whole.endswith(b"}")):
            return body
        comma = b"" if not whole[1:-1].strip() else b","
        return whole[:-1] + comma + orjson.dumps({MEMBER: self._explanation()})[1:]

    def _explanation(self) -> Mapping[str, Any]:
        figures = self._record.figures()
        return explain(own_figures(figures) if self._record.hides_others else figures).as_json()


class Exchange(Protocol):
    """One request and its response. Its methods must not fail and must not block."""

    def begin(self, status: int, content_type: str, /) -> None:
        """Note the header of the response; called again if another instance takes over."""

    def add(self, chunk: bytes, /) -> None:
        """Note bytes of the body that are sent to the client."""

    def end(self, record: AccessRecord, failure: BaseException | None, /) -> None:
        """Note that the response is complete, or ended in a failure."""


# Returns the exchange that begins with a request, or None to ignore the request.
Observe = Callable[[ProxyRequest], Exchange | None]


class CapturePoint:
    """`observe` is None unless a capture runs; other requests cost only that check."""

    def __init__(self) -> None:
        self.observe: Observe | None = None

    @contextmanager
    def attach(self, observe: Observe) -> Iterator[None]:
        self.observe = observe
        try:
            yield
        finally:
            self.observe = None


class Captured(StreamTransform):
    """Shows an exchange the instance's bytes, before other transforms change them."""

    holds_whole = False

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self._exchange.begin(status, headers.get("Content-Type", ""))

    def feed(self, chunk: bytes) -> bytes:
        self._exchange.add(chunk)
        return chunk

    def whole(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 (of any status)
        return self.feed(body)

    def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> bytes:
        self.begin(status, headers)
        return self.feed(body)
