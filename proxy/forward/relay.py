"""Relays one response to the client: passed, streamed, assembled or refused.

A stream is inspected up to the first token; after that a chunk costs one read, one write and a
count, all in one step of the loop and without waking the request. A client that reads slowly holds
up the instance, not our memory.

Timings and message are read after the bytes were passed on. A client repeats our answer in its next
request: the message identifies the conversation. A response that is too long, or of another format,
has neither; nothing waits for them and nothing fails. Of embeddings and reranking the tokens are
read as the response passes. Source: llama-server, build 10434: `usage` with `prompt_tokens`, before
the numbers or behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.common.headers import DRAINING, JSON, for_client, is_event_stream, is_json
from proxy.errors import (
    TrialFailed,
    Unfinished,
    UpstreamConnectFailed,
    UpstreamDraining,
    UpstreamFailed,
    UpstreamLoading,
    UpstreamShutDown,
    UpstreamUnavailable,
    quote,
)
from proxy.forward.assemblers import Assembler, ChatAssembler, Response, assembler_for, reader_for
from proxy.forward.prefill import PrefillFilter, is_start, progress_of, prompt_of
from proxy.forward.response import ResponseWriter
from proxy.forward.upstream_errors import (
    client_error_body,
    error_code,
    is_loading,
    is_model_missing,
    parse_error,
    reclassify_error,
    shortened,
    status_of,
)
from proxy.forward.upstream_request import UpstreamRequestPlan
from proxy.router.lease import Completion, Lease
from proxy.router.router import Router
from proxy.upstream.client import UpstreamResponse
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.sse import DONE, InvalidEvent, Splitter, has_done, members_of, objects_of
from proxy.upstream.timings import Timings

_USAGE: Final = re.compile(rb'"usage":\s*\{[^{}]{0,256}?"prompt_tokens":\s*(\d{1,12})')
_USAGE_END_BYTES: Final = 1024


class EmbeddingUsage:
    def __init__(self) -> None:
        self._head = b""
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        if len(self._head) < _USAGE_END_BYTES:
            self._head += chunk[:_USAGE_END_BYTES]
        self._tail = (self._tail + chunk)[-_USAGE_END_BYTES:]

    def close(self) -> Completion:
        found = _USAGE.search(self._head) or _USAGE.search(self._tail)
        return Completion(all_choices=Timings(0, int(found[1]), 0.0, 0, 0.0) if found else None)


# A few tokens: read together for less than one at a time, and little to keep for each stream.
_BATCH_BYTES: Final = 1024
_TOTAL_MAX_BYTES: Final = 4 * 1024**2


def completion_of(response: Response) -> Completion:
    """Return what a complete response reports; raises as `Response` does."""
    timings, others = Timings.read(response.timings()), response.other_timings()
    together = _sum_timings(timings, others) if timings and others else timings
    return Completion(timings, response.message(), together)


def _sum_timings(first: Timings, others: Iterable[object]) -> Timings:
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
            try:
                self._reader.take(orjson.loads(b"".join(self._chunks)))
            except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
                self._total_bytes = _TOTAL_MAX_BYTES + 1
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
        is_whole = self._total_bytes <= _TOTAL_MAX_BYTES and not self._splitter.take_rest()
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


_ERROR_MAX_BYTES: Final = 1024**2
_ASSEMBLED_MAX_BYTES: Final = 64 * 1024**2
# How a complete stream ends, where it ends in a way that is always the same.
_ENDS: Final = {
    EndpointKind.CHAT: DONE,
    EndpointKind.COMPLETION: DONE,
    EndpointKind.MESSAGES: b"message_stop",
}
_END_BYTES: Final = 64
# An engine on trial may have them where others have none.
_OWN_ERRORS: Final = frozenset({HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE})
_UNLEARNED: Final = frozenset(
    {
        EndpointKind.EMBED_OR_RERANK,
        EndpointKind.TRANSCRIPTION,
        EndpointKind.PROMPT,
        EndpointKind.INFO,
    }
)


class ResponseRelay:
    def __init__(
        self,
        router: Router,
        plan: UpstreamRequestPlan,
        lease: Lease,
        response: UpstreamResponse,
        client_response: ResponseWriter,
    ) -> None:
        self._router = router
        self._request = lease.request
        self._progress = lease.progress
        self._plan = plan
        self._lease = lease
        self._response = response
        self._client_response = client_response
        self._name = lease.upstream.name

    async def run(self) -> bool:
        """Relay the response to its end.

        Returns:
            Whether the client has it. If not, nothing was sent: the stream had no text to assemble,
            and the whole response must be requested.

        Raises:
            ConnectionError: The client left.
            UpstreamConnectFailed: Nothing was sent, and nothing more will arrive.
            UpstreamFailed: The instance broke off, or sent another format than requested.
            UpstreamTimeout: It sent nothing for too long.
        """
        response, plan = self._response, self._plan
        try:
            if response.status >= 400 and self._request.method != "HEAD":
                await self._relay_error()
            elif 300 <= response.status < 400:
                raise UpstreamFailed(f"{self._name} redirected the request; check its url")
            elif plan.is_assembled and is_event_stream(response.headers):
                return await self._assemble()
            elif not plan.is_stream or (plan.is_assembled and is_json(response.headers)):
                await self._relay_body()
            elif is_event_stream(response.headers):
                await self._relay_stream()
            else:
                raise UpstreamFailed(f"{self._name} sent no event stream where one was requested")
        except InvalidEvent as error:
            raise UpstreamFailed(f"{self._name} sent a broken stream: {error}") from error
        return True

    async def _relay_body(self) -> None:
        headers = self._response.headers
        is_passable = is_json(headers) or is_event_stream(headers)
        if self._request.method != "HEAD" and not is_passable:
            content_type = quote(headers["Content-Type"])
            raise UpstreamFailed(f"{self._name} answered with {content_type}, not with JSON")
        if encoding := headers.get("Content-Encoding"):
            encoding = quote(encoding)
            raise UpstreamFailed(f"{self._name} encoded its answer with {encoding}, unasked")
        completed = self._reader()
        await self._client_response.begin(self._response.status, for_client(self._response.headers))
        chunk = b""
        while not self._response.is_read:
            if chunk:
                await self._client_response.write(chunk)
                self._progress.is_awaiting_upstream = True
                if completed:
                    completed.feed(chunk)
            chunk = await self._response.read()
            self._progress.receive(chunk)
        await self._finish(completed, chunk)

    def _reader(self) -> CompletedResponse | EmbeddingUsage | None:
        if self._response.status != HTTPStatus.OK:
            return None
        if self._request.kind is EndpointKind.EMBED_OR_RERANK:
            return EmbeddingUsage()
        is_read = self._request.kind not in _UNLEARNED
        return CompletedResponse(self._request.kind, is_stream=False) if is_read else None

    async def _relay_stream(self) -> None:
        """Pass a stream on; its last piece is sent with its end."""
        progress, client_response, response = self._progress, self._client_response, self._response
        completed = CompletedResponse(self._request.kind, is_stream=True)
        before = b""

        def pass_on(chunk: bytes) -> bool:
            nonlocal before
            if not client_response.put(chunk):
                return False
            before = chunk
            progress.receive_token(chunk)
            progress.is_awaiting_upstream = True
            completed.feed(chunk)
            return True

        try:
            last = await self._until_first_token(completed)
            while not response.is_read:
                await client_response.write(last)
                progress.is_awaiting_upstream = True
                completed.feed(last)
                before = last
                last = await response.read(pass_on)
                progress.receive_token(last)
        except UpstreamFailed:
            self._lease.unfinished = completed.unfinished()
            raise
        end = before + last
        if _ENDS.get(self._request.kind, b"") not in end[-_END_BYTES:]:
            error = _last_error(end)
            if error is None:
                await client_response.write(last)
                raise UpstreamFailed(
                    f"{self._name} ended its stream before the answer was complete"
                )
            client_response.record.status = status_of(error)
            client_response.record.code = error_code(error)
        await self._finish(completed, last)

    async def _until_first_token(self, completed: CompletedResponse) -> bytes:
        """Pass on what comes before the first token; return what comes with it."""
        prefill_filter = PrefillFilter(hides_progress=self._plan.hides_progress)
        while True:
            chunk = await self._read()
            if not chunk:
                raise self._broken_off()
            part = prefill_filter.feed(chunk)
            if prefill_filter.is_over:
                self._progress.receive_token(chunk)
            else:
                self._progress.receive(chunk)
            if latest := prefill_filter.latest:
                self._progress.set_prompt(latest.done, latest.total, latest.cached)
            if part:
                await self._client_response.begin(
                    self._response.status, for_client(self._response.headers)
                )
            if prefill_filter.is_over:
                self._client_response.record.timeline.note_token()
                return part
            if part:
                await self._client_response.write(part)
                completed.feed(part)
            self._progress.is_awaiting_upstream = True

    async def _assemble(self) -> bool:
        """Send the whole that a stream adds up to; return False where that is blank."""
        assembler = assembler_for(self._request.kind, self._request.json)
        splitter = Splitter()
        total_bytes, is_done = 0, _ENDS.get(self._request.kind) != DONE
        while chunk := await self._read():
            self._progress.receive(chunk)
            total_bytes += len(chunk)
            if total_bytes > _ASSEMBLED_MAX_BYTES:
                raise UpstreamFailed(f"the response of {self._name} is too long; request a stream")
            events = splitter.feed(chunk)
            is_done = is_done or has_done(events)
            for piece in objects_of(events):
                if "error" in piece:
                    await self._relay_error_event(piece)
                    return True
                self._add(assembler, piece)
            self._progress.is_awaiting_upstream = True
        if not is_done or not assembler.is_complete:
            raise self._broken_off()
        if assembler.is_blank:
            self._lease.report(completion_of(assembler).all_choices)
            return False
        await self._send_json(assembler)
        return True

    def _add(self, assembler: Assembler, piece: Mapping[str, Any]) -> None:
        if progress := progress_of(piece):
            self._progress.set_prompt(progress.done, progress.total, progress.cached)
        elif not is_start(piece):
            if begun := prompt_of(piece):
                self._progress.set_prompt(begun.done, begun.total, begun.cached)
            self._client_response.record.timeline.note_token()
            self._progress.count_token()
        try:
            assembler.add(piece)
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidEvent(f"an event is no piece of a response: {error!r}") from error

    async def _send_json(self, assembler: Assembler) -> None:
        body = orjson.dumps(assembler.whole())
        self._learn(completion_of(assembler))
        headers = CIMultiDict({"Content-Type": JSON, "Content-Length": str(len(body))})
        await self._client_response.begin(200, headers)
        await self._client_response.finish(body)

    async def _relay_error(self) -> None:
        body = b""
        while chunk := await self._response.read():
            self._progress.receive(chunk)
            body += chunk
            if len(body) > _ERROR_MAX_BYTES:
                body = self._shortened(body)
                break
            self._progress.is_awaiting_upstream = True
        await self._send_error(self._response.status, for_client(self._response.headers), body)

    def _shortened(self, beginning: bytes) -> bytes:
        if body := shortened(self._response.status, beginning):
            return body
        raise UpstreamFailed(f"{self._name} sent an error of more than 1 MiB")

    async def _relay_error_event(self, piece: Mapping[str, Any]) -> None:
        """Send an error that arrived where the client sees no stream."""
        body = orjson.dumps(piece)
        status = status_of(parse_error(body) or {})
        await self._send_error(status, CIMultiDict({"Content-Type": JSON}), body)

    async def _send_error(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        if self._lease.upstream.node and DRAINING in self._response.headers:
            raise UpstreamDraining(self._name, "is stopping; retry")
        if is_loading(status, body):
            raise UpstreamLoading(self._name, "is still loading its model; retry")
        if self._lease.upstream.node and is_model_missing(status, body):
            raise UpstreamUnavailable(self._name, "cannot serve its model now; retry")
        if self._client_response.has_begun and parse_error(body) is None:
            raise UpstreamFailed(f"{self._name} answered {status} without a reason")
        status, body = reclassify_error(status, body)
        if status in _OWN_ERRORS and self._lease.upstream.is_on_trial:
            raise TrialFailed(self._name, f"is on trial and answered {status}")
        self._router.finish(self._lease)
        client_body = client_error_body(self._request.kind, self._request.path, status, body)
        headers["Content-Length"], headers["Content-Type"] = str(len(client_body)), JSON
        self._client_response.record.code = error_code(parse_error(body) or {})
        await self._client_response.refuse(status, headers, client_body)

    async def _finish(
        self, completed: CompletedResponse | EmbeddingUsage | None, last: bytes
    ) -> None:
        if completed is None:
            self._learn(Completion())
        else:
            completed.feed(last)
            self._learn(completed.close())
        await self._client_response.finish(last)

    def _learn(self, completion: Completion) -> None:
        if self._lease.chunked and completion.timings:
            timings = completion.timings.with_chunks(self._lease.chunked)
            completion = replace(completion, timings=timings, all_choices=timings)
        # Before the client has taken the end: a slow one must not keep the slot.
        self._client_response.record.timings = completion.all_choices
        self._lease.report(completion.all_choices)
        self._router.finish(self._lease, completion)
        self._client_response.record.cache = self._lease.finding

    async def _read(self) -> bytes:
        """Read while nothing of the response was sent: what breaks can be retried."""
        try:
            return await self._response.read()
        except UpstreamShutDown:
            raise
        except UpstreamFailed as error:
            raise self._broken_off() from error

    def _broken_off(self) -> UpstreamFailed:
        if self._client_response.is_committed:
            return UpstreamFailed(f"{self._name} broke off its answer")
        return UpstreamConnectFailed(self._name, "broke off its answer before any of it went out")


def _last_error(end: bytes) -> Mapping[str, Any] | None:
    """Return the error that a stream ends with; None if its last event is none.

    Source: llama-server, build 10434: an error event is the last one, without an end mark.
    """
    try:
        event = members_of(end.rstrip().rpartition(b"\n\n")[2]) or {}
    except InvalidEvent:
        return None
    if "error" not in event:
        return None
    return event["error"] if isinstance(event["error"], dict) else {}
