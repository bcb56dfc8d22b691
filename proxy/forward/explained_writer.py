"""Adds the explanation of a request to its response, for clients that ask for it by a header.

A whole response gets the member `corral`. A stream of OpenAI's completions gets one more chunk,
with no choices, before `[DONE]`; other streams get the member in their last event. Events pass as
they are until the last one begins. The header has the slot that the request used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.errors import UpstreamFailed
from proxy.explanation.explanation import explain, own_figures
from proxy.forward.client_response import RequestWriter
from proxy.forward.passed_response import PassedRequest
from proxy.headers import SLOT, is_event_stream
from proxy.router.lease import Lease
from proxy.upstream.sse import DONE

MEMBER: Final = "corral"
_HELD_MAX_BYTES: Final = 64 * 1024**2
_END: Final = b"\n\n"
# The last event of a stream: of OpenAI's completions, Anthropic's messages, OpenAI's responses and
# llama-server's own completion. Quotes within texts are escaped.
_LAST: Final = re.compile(
    rb'^data: \[DONE\]|^event: (?:message_stop|response\.(?:completed|incomplete))|"stop":true',
    re.MULTILINE,
)
_IN_ALL_CHUNKS: Final = ("id", "object", "created", "model", "system_fingerprint")


class ExplainedWriter(PassedRequest):
    def __init__(self, writer: RequestWriter) -> None:
        super().__init__(writer)
        self._is_stream = False
        self._status = 0
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._lease: Lease | None = None
        self._held = b""
        self._passed = b""  # the last events that went out

    def leased(self, lease: Lease) -> None:
        self._lease = lease
        super().leased(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        number = self._lease.slot_number if self._lease else None
        if number is not None:
            headers[SLOT] = str(number)
        self._status, self._headers, self._is_stream = status, headers, is_event_stream(headers)
        if self._is_stream:
            await self._writer.begin(status, headers)

    def put(self, chunk: bytes) -> bool:
        if not self._is_stream or not self._writer.put(b""):
            return False
        passed = self._feed(chunk)
        return self._writer.put(passed) if passed else True

    async def write(self, chunk: bytes) -> None:
        """Raises UpstreamFailed for too large a body."""
        if passed := self._feed(chunk):
            await self._writer.write(passed)

    async def finish(self, last: bytes = b"") -> None:
        passed = self._feed(last)
        if self._is_stream:
            await self._writer.finish(passed + _with_last(self._held, self._passed, self._told()))
            return
        body = _with_member(self._held, self._told())
        self._headers["Content-Length"] = str(len(body))
        await self._writer.begin(self._status, self._headers)
        await self._writer.finish(body)

    def _told(self) -> Mapping[str, Any]:
        figures = self.record.figures()
        return explain(own_figures(figures) if self.record.hides_others else figures).as_json()

    def _feed(self, chunk: bytes) -> bytes:
        """Return what may pass now: of a stream, whole events before the last one."""
        self._held += chunk
        if len(self._held) > _HELD_MAX_BYTES:
            raise UpstreamFailed(
                f"the response of {self.record.instance} is too long to be explained"
            )
        if not self._is_stream:
            return b""
        whole = _whole_events(self._held)
        passed, self._held = self._held[:whole], self._held[whole:]
        self._passed = passed or self._passed
        return passed


def _whole_events(held: bytes) -> int:
    """Return how many bytes are whole events before the last one of a stream."""
    last = _LAST.search(held)
    at = held.rfind(_END, 0, last.start() if last else len(held))
    return at + len(_END) if at >= 0 else 0


def _with_member(body: bytes, told: Mapping[str, Any]) -> bytes:
    """Return a JSON object with the explanation; other bodies as they are."""
    whole = body.rstrip()
    if not (whole.startswith(b"{") and whole.endswith(b"}")):
        return body
    comma = b"" if not whole[1:-1].strip() else b","
    return whole[:-1] + comma + orjson.dumps({MEMBER: told})[1:]


def _with_last(last: bytes, passed: bytes, told: Mapping[str, Any]) -> bytes:
    """Return the end of a stream with the explanation; without an end, what there is of it."""
    event, end, rest = last.partition(_END)
    if DONE in event:
        return b"data: " + orjson.dumps({**_shared(passed), MEMBER: told}) + _END + last
    if not event.endswith(b"}"):
        return last
    return event[:-1] + b"," + orjson.dumps({MEMBER: told})[1:] + end + rest


def _shared(passed: bytes) -> dict[str, Any]:
    """Return what all chunks of a stream have, of the last one that went out."""
    line = passed.rstrip().rpartition(b"data: ")[2]
    try:
        chunk = orjson.loads(line)
        found = {name: chunk[name] for name in _IN_ALL_CHUNKS if name in chunk}
    except (ValueError, TypeError):
        found = {}
    return {"choices": [], **found}
