"""Plans the request to an instance, and relays the response to the client.

`plan_request` decides whether to request a stream, and whether to assemble it here. An engine
notices late that the client of a whole response has left, or not at all while another stream runs,
and it sends nothing before the response is complete. So completions are requested as a stream and
assembled here (`Assembler`); the result equals the engine's own whole response. A request passes
unchanged if the result would differ:

- `logprobs`, `n_probs`: a stream omits tokens that add no text, including the last one
- `verbose`, `response_fields`: a stream has other details
- `return_tokens`, except for llama-server's own completion
- `continue_final_message`: a stream omits the message that it continues
- several completions from llama-server's own endpoint
- all other endpoints

An assembled response without text is requested again as the client wrote it, because
a stream omits an incomplete character and the start of a stop string. So is a response that lacks
some of the requested token ids: for a character of several tokens, a stream has only the last. One
difference remains: if a response reaches its limit within a character (U+FFFD) or a stop string, a
whole response includes that part, and a stream or an assembled response does not.

A client's stream is requested with progress only if progress changes nothing else in the stream. A
chat that continues the assistant's message has that message in its first progress, and OpenAI's
responses have other events there: both are requested as the client wrote them. A body that needs no
change passes byte for byte; a changed one keeps every member of the client.

`ResponseRelay` inspects a stream up to the first token. After that, a chunk costs one read, one
write and a count, in one step of the event loop and without waking the request. A client that reads
slowly slows down the instance; nothing accumulates in our memory. Timings and message are read
after the bytes were passed on: the message identifies the conversation, because the client repeats
it in its next request.

Source: llama-server, builds 10434 and 11434: `return_progress` on each endpoint; of a repeated
member the last counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import orjson
from attrs import define
from multidict import CIMultiDict

from proxy.common.headers import DRAINING, JSON, for_client, is_event_stream, is_json
from proxy.errors import (
    NO_ANSWER,
    TrialFailed,
    Unfinished,
    UpstreamConnectFailed,
    UpstreamDraining,
    UpstreamFailed,
    UpstreamLoading,
    UpstreamUnavailable,
    quote,
)
from proxy.forward import assemblers, second_request, upstream_errors
from proxy.forward.prefill import PrefillFilter, is_start, progress_of, prompt_of
from proxy.forward.response import Response
from proxy.forward.tool_calls import HistoryRefused
from proxy.http.api_formats import error_code, parse_error
from proxy.request.request import ProxyRequest, is_single
from proxy.request.tools import with_mended_history
from proxy.router.lease import Completion, Lease
from proxy.router.router import Router
from proxy.upstream.client import UpstreamResponse
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import DONE, InvalidEvent, Splitter, members_of

_COMPLETIONS: Final = frozenset({EndpointKind.CHAT, EndpointKind.COMPLETION})
_ASSEMBLED: Final = _COMPLETIONS | {
    EndpointKind.MESSAGES,
    EndpointKind.RESPONSES,
    EndpointKind.LLAMA_COMPLETION,
}
_STREAMED: Final = _ASSEMBLED | {EndpointKind.INFILL}
# In Anthropic's API `return_progress` changes nothing.
_WITH_PROGRESS: Final = _STREAMED - {EndpointKind.MESSAGES}
_REWRITTEN_MAX_BYTES: Final = 1024**2
_UNEQUAL: Final = frozenset(
    ("logprobs", "n_probs", "verbose", "response_fields", "return_tokens", "continue_final_message")
)


# Not frozen, as `ProxyRequest`.
@dataclass(slots=True)
class UpstreamRequestPlan:
    """The body to send, and how to treat the response."""

    body: bytes
    is_stream: bool = False  # a stream is requested
    is_assembled: bool = False  # the stream is assembled into a whole response
    hides_progress: bool = False  # progress is removed: the client did not ask for it

    def with_slot(self, slot: int | None, *, is_cache_off: bool = False) -> bytes:
        """Return the body with `id_slot` if a slot is given; `is_cache_off` disables the cache."""
        members: dict[str, Any] = {} if slot is None else {"id_slot": slot}
        if is_cache_off:
            members["cache_prompt"] = False
        return _with_members(self.body, members, is_empty=False) if members else self.body


def is_passed_stream(request: ProxyRequest) -> bool:
    """Return whether the client gets a stream."""
    return request.is_stream and request.kind in _STREAMED


def plan_request(request: ProxyRequest, *, is_rest: bool = False) -> UpstreamRequestPlan:
    """Return the request to send; `is_rest`: a `Continuation` removes repeated text."""
    members = request.json
    is_assembled = _is_assembled(request)
    is_stream = is_assembled or is_passed_stream(request)
    changes: dict[str, Any] = {}
    if is_assembled:
        changes["stream"] = True
    if is_assembled and request.kind in _COMPLETIONS:
        options = members.get("stream_options")
        given = options if isinstance(options, dict) else {}
        changes["stream_options"] = {**given, "include_usage": True}
    hides_progress = (
        _is_off(members.get("return_progress"))
        and request.kind in _WITH_PROGRESS
        and is_single(members)  # else progress also comes after the first token
        and (is_assembled or (is_stream and (is_rest or _is_same_with_progress(request))))
    )
    if hides_progress:
        changes["return_progress"] = True
    body = request.body
    # Serialising a large body takes long, and of a repeated member the last counts.
    if not changes.keys().isdisjoint(members) and len(body) <= _REWRITTEN_MAX_BYTES:
        body = orjson.dumps({**members, **changes})
    elif changes:
        body = _with_members(body, changes, is_empty=not members)
    return UpstreamRequestPlan(body, is_stream, is_assembled, hides_progress)


def _is_assembled(request: ProxyRequest) -> bool:
    """Return whether a whole response equals the assembled stream."""
    members = request.json
    if not _is_off(members.get("stream")) or request.kind not in _ASSEMBLED or request.form:
        return False
    unequal = _UNEQUAL.intersection(members)
    is_llama = request.kind is EndpointKind.LLAMA_COMPLETION
    if is_llama and members.get("return_tokens") is True:
        unequal -= {"return_tokens"}
    return not any(map(members.get, unequal)) and (not is_llama or is_single(members))


def _is_same_with_progress(request: ProxyRequest) -> bool:
    """Whether progress changes nothing else in a stream."""
    match request.json.get("messages"):
        case [*_, {"role": "assistant"}]:
            return False
    return request.kind is not EndpointKind.RESPONSES


def _is_off(member: object) -> bool:
    """Whether a member is off; the engine judges values that are not booleans."""
    return member is None or member is False


def _with_members(body: bytes, members: Mapping[str, Any], *, is_empty: bool) -> bytes:
    """Append members to an object; the client's own bytes, such as numbers, stay unchanged."""
    head = memoryview(body)[: body.rindex(b"}")]
    return b"".join((head, b"" if is_empty else b",", orjson.dumps(members)[1:]))


_ERROR_MAX_BYTES: Final = 1024**2
_ASSEMBLED_MAX_BYTES: Final = 64 * 1024**2
# The end mark of a complete stream, for the kinds whose streams have one.
_ENDS: Final = {
    EndpointKind.CHAT: DONE,
    EndpointKind.COMPLETION: DONE,
    EndpointKind.MESSAGES: b"message_stop",
}
_END_BYTES: Final = 64
# The chunks of an assembled response, nearly always a token each, that are read together.
_TAKEN_MAX: Final = 32
# An engine on trial may return these errors although others do not.
_OWN_ERRORS: Final = frozenset({HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE})


@define(eq=False, slots=False)
class ResponseRelay:
    _router: Router
    _plan: UpstreamRequestPlan
    _lease: Lease
    _response: UpstreamResponse
    _client_response: Response

    def __attrs_post_init__(self) -> None:
        self._request, self._progress = self._lease.request, self._lease.progress
        self._name = self._lease.upstream.name

    def run(self) -> Awaitable[bool]:
        """Relay the response to its end.

        Returns:
            True if the response was sent. If False, nothing was sent: the stream had no text to
            assemble, and the whole response must be requested.

        Raises:
            ConnectionError: The client left.
            InvalidEvent: The instance sent a broken stream.
            UpstreamConnectFailed: The instance broke off before any of the response was sent.
            UpstreamFailed: The instance broke off, or sent another format than requested.
            UpstreamTimeout: The instance sent nothing for too long.
        """
        status, headers, plan = self._response.status, self._response.headers, self._plan
        if status >= 400 and self._request.method != "HEAD":
            return self._relay_error()
        if 300 <= status < 400:
            raise UpstreamFailed(f"{self._name} redirected the request; check its url")
        is_stream = is_event_stream(headers)
        if plan.is_assembled and is_stream:
            return self._assemble()
        if not plan.is_stream or (plan.is_assembled and is_json(headers)):
            return self._relay_body()
        if is_stream:
            return self._relay_stream()
        raise UpstreamFailed(f"{self._name} sent no event stream where one was requested")

    async def _relay_body(self) -> bool:
        headers = self._response.headers
        is_passable = is_json(headers) or is_event_stream(headers)
        if self._request.method != "HEAD" and not is_passable:
            content_type = quote(headers["Content-Type"])
            raise UpstreamFailed(f"{self._name} answered with {content_type}, not with JSON")
        if encoding := headers.get("Content-Encoding"):
            encoding = quote(encoding)
            raise UpstreamFailed(f"{self._name} encoded its answer with {encoding}, unasked")
        kind = self._request.kind
        completed: assemblers.CompletedResponse | assemblers.EmbeddingUsage | None = None
        if self._response.status == 200 and kind.generates:
            completed = assemblers.CompletedResponse(kind, is_stream=False)
        elif self._response.status == 200 and kind is EndpointKind.EMBED_OR_RERANK:
            completed = assemblers.EmbeddingUsage()
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
        await self._finish(completed.close(chunk) if completed else Completion(), chunk)
        return True

    async def _relay_stream(self) -> bool:
        """Pass a stream on; the last piece is sent together with the end of the body."""
        progress, client_response, response = self._progress, self._client_response, self._response
        completed = assemblers.CompletedResponse(self._request.kind, is_stream=True)
        before = b""

        def pass_on(chunk: bytes, framed: bytes) -> bool:
            nonlocal before
            if not client_response.put(chunk, framed):
                return False
            before = chunk
            progress.count_chunk(chunk)
            completed.feed(chunk)
            return True

        if self._lease.place:
            self._let_yield(completed.partial_text)
        try:
            last = await self._until_first_token(completed)
            while not response.is_read:
                completed.feed(last)
                before = last
                await client_response.write(last)
                progress.is_awaiting_upstream = True
                last = await response.read(pass_on)
                progress.is_awaiting_upstream = False
                progress.count_chunk(last)
        except UpstreamFailed as failure:
            self._lease.unfinished = completed.partial_text()
            raise self._broken_off() from failure
        end = before + last
        # Not `in`, which first raises and drops a TypeError.
        if end[-_END_BYTES:].find(_ENDS.get(self._request.kind, b"")) < 0:
            error = _last_error(end)
            if error is None:
                await client_response.write(last)
                raise UpstreamFailed(
                    f"{self._name} ended its stream before the answer was complete"
                )
            client_response.record.status = upstream_errors.status_of(error)
            client_response.record.code = error_code(error)
        await self._finish(completed.close(last), last)
        return True

    async def _until_first_token(self, completed: assemblers.CompletedResponse) -> bytes:
        """Pass on the stream before the first token; return the piece that has the first token."""
        prefill_filter = PrefillFilter(hides_progress=self._plan.hides_progress)
        while True:
            chunk = await self._response.read()
            if not chunk:
                raise self._broken_off()
            part = prefill_filter.feed(chunk)
            self._progress.receive(chunk)
            if prefill_filter.is_over:
                self._progress.count_token()
            if prefill_filter.latest:
                self._progress.set_prompt(*prefill_filter.latest)
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
        """Send the assembled response; return False, with nothing sent, if it is blank."""
        assembler = assemblers.assembler_for(self._request.kind, self._request.json)
        splitter, total_bytes = Splitter(), 0

        if self._lease.place:
            self._let_yield(lambda: assembler.partial_text() if splitter.is_between else None)
        while chunk := await self._read():
            total_bytes += len(chunk)
            if total_bytes > _ASSEMBLED_MAX_BYTES:
                raise UpstreamFailed(f"the response of {self._name} is too long; request a stream")
            for piece in splitter.objects(chunk):
                if "error" in piece:  # the client requested a whole response
                    body = orjson.dumps(piece)
                    status = upstream_errors.status_of(parse_error(body) or {})
                    await self._send_error(status, CIMultiDict({"Content-Type": JSON}), body)
                    return True
                self._add(assembler, piece)
            self._progress.is_awaiting_upstream = True
        self._progress.is_awaiting_upstream = False
        is_cut = _ENDS.get(self._request.kind) == DONE and not splitter.has_done
        if is_cut or not assembler.is_complete:
            raise self._broken_off()
        if assembler.is_blank:
            self._lease.report(assemblers.completion_of(assembler).all_choices)
            return False
        body = orjson.dumps(assembler.assemble())
        headers = CIMultiDict({"Content-Type": JSON, "Content-Length": str(len(body))})
        await self._client_response.begin(200, headers)
        await self._finish(assemblers.completion_of(assembler), body)
        return True

    def _let_yield(self, partial_text: Callable[[], Unfinished | None]) -> None:
        """Let the response be stopped before its last token.

        A prompt is stopped only if the engine has not begun its last pass, which it would end in
        any case. So the same passes compute the rest later, which is rounded the same.
        """
        progress, request = self._progress, self._request

        def stop() -> Unfinished | None:
            if not progress.decoded:
                left = progress.prompt_total - progress.prompt_done
                return NO_ANSWER if 0 < progress.prompt_step < left else None
            found = partial_text()
            if found is None or not (progress.is_reported and found.text):
                return None
            # The event with a text that is continued is no token; streams have it in their first.
            tokens = progress.decoded if self._plan.is_assembled else found.tokens
            if not tokens or second_request.is_at_limit(request, tokens):
                return None
            self._response.stop_taking()
            return replace(found, tokens=tokens, prompt_tokens=progress.prompt_total)

        self._lease.let_yield(stop)

    def _add(self, assembler: assemblers.Assembler, piece: Mapping[str, Any]) -> None:
        progress = self._progress
        if progress.decoded and self._request.slots == 1:  # nothing but tokens follows
            progress.decoded += 1
        elif figures := progress_of(piece):
            progress.set_prompt(*figures)
        elif not is_start(piece):
            if prompt := prompt_of(piece):
                progress.set_prompt(*prompt)
            self._client_response.record.timeline.note_token()
            progress.count_token()
        try:
            assembler.add(piece)
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidEvent(f"an event is no piece of a response: {error!r}") from error

    async def _relay_error(self) -> bool:
        body = b""
        while chunk := await self._response.read():
            self._progress.receive(chunk)
            body += chunk
            if len(body) > _ERROR_MAX_BYTES:
                shortened = upstream_errors.shorten_error(self._response.status, body)
                if shortened is None:
                    raise UpstreamFailed(f"{self._name} sent an error of more than 1 MiB")
                body = shortened
                break
            self._progress.is_awaiting_upstream = True
        await self._send_error(self._response.status, for_client(self._response.headers), body)
        return True

    async def _send_error(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        if self._lease.upstream.node and DRAINING in self._response.headers:
            raise UpstreamDraining(self._name, "is stopping; retry")
        if upstream_errors.is_loading(status, body):
            raise UpstreamLoading(self._name, "is still loading its model; retry")
        if self._lease.upstream.node and upstream_errors.is_model_missing(status, body):
            raise UpstreamUnavailable(self._name, "cannot serve its model now; retry")
        if self._client_response.has_begun and parse_error(body) is None:
            raise UpstreamFailed(f"{self._name} answered {status} without a reason")
        status, body = upstream_errors.reclassify_error(status, body)
        if upstream_errors.is_broken_history(body):
            request, count = with_mended_history(self._request)
            if count:
                self._router.finish(self._lease)
                raise HistoryRefused(request, count)
        if status in _OWN_ERRORS and self._lease.upstream.is_on_trial:
            raise TrialFailed(self._name, f"is on trial and answered {status}")
        self._router.finish(self._lease)
        client_body = self._client_response.api.engine_error(status, body)
        headers["Content-Length"], headers["Content-Type"] = str(len(client_body)), JSON
        self._client_response.record.code = error_code(parse_error(body) or {})
        await self._client_response.refuse(status, headers, client_body)

    async def _finish(self, completion: Completion, last: bytes) -> None:
        """Send the last bytes and learn from the response, in the order in which neither waits.

        A slow client must not keep the slot, and other clients need not wait while the router
        learns. The use is reported before both, so that it is recorded when a client has the
        response.
        """
        lease = self._lease
        if lease.chunked and completion.timings:
            timings = completion.timings.with_chunks(lease.chunked)
            completion = replace(completion, timings=timings, all_choices=timings)
        self._client_response.record.timings = completion.all_choices
        lease.report(completion.all_choices)
        self._router.signals.answered(lease)
        if self._client_response.ends_at_once(len(last)):
            try:
                await self._client_response.finish(last)
            finally:
                self._learn(completion)
        else:
            self._learn(completion)
            await self._client_response.finish(last)

    def _learn(self, completion: Completion) -> None:
        self._router.finish(self._lease, completion)
        self._client_response.record.cache = self._lease.finding

    async def _read(self) -> bytes:
        """Read while none of the response was sent, so that a failure can be retried.

        After the first token, further ones are taken without waking the request for each, unless
        the response may be stopped between any two.
        """
        response, progress = self._response, self._progress
        if response.is_read:
            return b""
        taken: list[bytes] = []
        is_taken = progress.decoded and self._request.slots == 1 and not self._lease.place
        try:
            chunk = await response.read(partial(self._take, taken) if is_taken else None)
        except UpstreamFailed as error:
            raise self._broken_off() from error
        progress.receive(chunk)
        if taken:
            progress.decoded -= len(taken)  # `_add` counts their events
            chunk = b"".join((*taken, chunk))
        return chunk

    def _take(self, taken: list[bytes], chunk: bytes, _framed: bytes) -> bool:
        if len(taken) == _TAKEN_MAX:
            return False
        taken.append(chunk)
        self._progress.count_chunk(chunk)
        return True

    def _broken_off(self) -> UpstreamFailed:
        if self._client_response.is_committed:
            return UpstreamFailed(f"{self._name} broke off its answer")
        return UpstreamConnectFailed(self._name, "broke off its answer before any of it went out")


def _last_error(end: bytes) -> Mapping[str, Any] | None:
    """Return the error that ends a stream; None if its last event is no error.

    Source: llama-server, build 10434: an error event is the last event, without an end mark.
    """
    try:
        event = members_of(end.rstrip().rpartition(b"\n\n")[2]) or {}
    except InvalidEvent:
        return None
    if "error" not in event:
        return None
    return event["error"] if isinstance(event["error"], dict) else {}
