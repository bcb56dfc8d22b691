"""The timings and the message of a response, read after its bytes were passed on. Pure.

A client repeats our answer in its next request: the message identifies the conversation. A response
that is too long, or of another format, has neither; nothing waits for them and nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import orjson

from proxy.endpoints import EndpointKind
from proxy.errors import Unfinished
from proxy.forward.apis import Response, reader_for
from proxy.forward.apis.chat import ChatAssembler
from proxy.router.lease import Completion
from proxy.upstream.sse import InvalidEvent, Splitter, objects_of
from proxy.upstream.timings import Timings

# A few tokens: read together for less than one at a time, and little to keep for each stream.
_BATCH_BYTES: Final = 1024
_TOTAL_MAX_BYTES: Final = 4 * 1024**2


def completion_of(response: Response) -> Completion:
    """Return what a complete response reports; raises as `Response` does."""
    timings, others = Timings.read(response.timings()), response.other_timings()
    together = _together(timings, others) if timings and others else timings
    return Completion(timings, response.message(), together)


def _together(first: Timings, others: Iterable[object]) -> Timings:
    """Add the answers beside the first: one prompt is computed for all of them."""
    whole = first
    for other in filter(None, map(Timings.read, others)):
        alone = replace(other, cached_tokens=0, prompt_tokens=0, prompt_ms=0.0)
        whole = alone.added_to(whole)
    return whole


class CompletedResponse:
    def __init__(self, kind: EndpointKind, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._chunks: list[bytes] = []
        self._batch_bytes = 0
        self._total_bytes = 0
        self._splitter = Splitter()
        self._reader = reader_for(kind)

    def feed(self, chunk: bytes) -> None:
        """Take bytes that were passed on; nearly always this only keeps them."""
        self._total_bytes += len(chunk)
        self._batch_bytes += len(chunk)
        if self._total_bytes > _TOTAL_MAX_BYTES:
            self._chunks.clear()
            return
        self._chunks.append(chunk)
        if self._is_stream and self._batch_bytes > _BATCH_BYTES:
            self._read_batch()

    def close(self) -> Completion:
        if self._total_bytes > _TOTAL_MAX_BYTES:
            return Completion()
        if self._is_stream:
            self._read_batch()
        else:
            self._read_body(b"".join(self._chunks))
        if self._total_bytes > _TOTAL_MAX_BYTES:
            return Completion()
        try:
            return completion_of(self._reader)
        except (LookupError, TypeError, AttributeError):
            return Completion()

    def unfinished(self) -> Unfinished | None:
        """Return the text of a chat whose stream broke off here.

        None if it is not plain text, is too long, or ends within an event.
        """
        self._read_batch()
        is_whole = self._total_bytes <= _TOTAL_MAX_BYTES and not self._splitter.rest()
        if is_whole and isinstance(self._reader, ChatAssembler):
            return self._reader.unfinished()
        return None

    def _read_batch(self) -> None:
        batch, self._batch_bytes = b"".join(self._chunks), 0
        self._chunks.clear()
        try:
            for piece in filter(None, objects_of(self._splitter.feed(batch))):
                self._reader.add(piece)
            self._reader.pack()
        except (InvalidEvent, KeyError, TypeError, AttributeError):
            self._total_bytes = _TOTAL_MAX_BYTES + 1

    def _read_body(self, body: bytes) -> None:
        try:
            self._reader.take(orjson.loads(body))
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            self._total_bytes = _TOTAL_MAX_BYTES + 1
