"""Forwards a request: leases an instance, exchanges request and response, and retries if safe.

A request is retried once, on another instance or on the same one if there is no other, if its
instance failed before any of the response was sent: it refused the connection, was still loading
its model, broke off, was stopped or was killed from outside. A request is not retried after its
engine crashed, as it may have caused the crash; if that engine is on trial, the trial is suspected
first, and the request is retried. The same holds for an engine's own error.

A failure after the first byte breaks the response. Exception: a plain chat whose engine was killed
from outside or crashed on trial is continued by another instance (`second_request`). A client that
leaves closes the upstream connection at once.

A request leaves an instance that sends no first byte and does not answer `/health` as soon as
another has a free slot. A request that a node refuses goes to others until one accepts it. Each
prompt of an array is a request of its own (`arrays`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from proxy.auth.api_keys import Admission
from proxy.errors import (
    NodeUnconnected,
    TrialCrashed,
    UpstreamConnectFailed,
    UpstreamFailed,
    UpstreamKilled,
    UpstreamShutDown,
    UpstreamSilent,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from proxy.forward.anthropic import MessagesWriter, as_chat
from proxy.forward.arrays import array_of, forward_parts
from proxy.forward.capture import CapturedResponse, CapturePoint
from proxy.forward.node_request import readdress
from proxy.forward.openai_responses import ResponsesWriter
from proxy.forward.prefill import PrefillChunks, has_chunks
from proxy.forward.relay import ResponseRelay, UpstreamRequestPlan, plain_plan, plan_request
from proxy.forward.response import RequestWriter, ResponseWriter
from proxy.forward.second_request import (
    AnswerBegan,
    AnswerDiffers,
    ContinuedResponse,
    HeldResponse,
    answer_request,
    call_request,
    continuations,
    requires_call,
)
from proxy.observe.record import Emit
from proxy.observe.timeline import Timeline
from proxy.request.models import ModelLoader
from proxy.request.request import ProxyRequest
from proxy.request.stored_responses import StoredTurn
from proxy.router.estimator import Estimator
from proxy.router.lease import Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, send
from proxy.upstream.endpoint_kinds import EndpointKind


class TimedLoader:
    """A `ModelLoader` that records in the timeline how long eviction and loading take."""

    __slots__ = ("_loader", "_timeline")

    def __init__(self, loader: ModelLoader, timeline: Timeline) -> None:
        self._loader = loader
        self._timeline = timeline

    async def ensure_ready(self, model: str) -> None:
        self._timeline.wait("evict")
        try:
            await self._loader.ensure_ready(model, functools.partial(self._timeline.wait, "load"))
        finally:
            self._timeline.wait()


def translate_request(
    request: ProxyRequest, client_response: RequestWriter, turn: StoredTurn | None
) -> tuple[ProxyRequest, RequestWriter]:
    """Return the engine's request, and the writer that translates its response for the client."""
    if request.kind is EndpointKind.RESPONSES:
        return request, ResponsesWriter(client_response, request, turn)
    if request.kind is EndpointKind.MESSAGES and (chat := as_chat(request)):
        return chat, MessagesWriter(client_response)
    return request, client_response


# A request leaves a silent instance after two seconds. If this many are silent, it fails.
_MOVES_MAX: Final = 4

# The request is not known to have caused the failure.
_HARMLESS: Final = (TrialCrashed, UpstreamKilled)
_RETRIED: Final = (UpstreamConnectFailed, UpstreamShutDown, *_HARMLESS)
# A node has not begun to work on the request.
_REFUSALS: Final = (NodeUnconnected, UpstreamUnavailable)


class Forward:
    def __init__(  # noqa: PLR0913 (a request passes through all of them)
        self,
        router: Router,
        loader: ModelLoader,
        settings: ProxySettings,
        emit: Emit,
        estimator: Estimator,
        capture: CapturePoint | None = None,
        *,
        admission: Admission | None = None,
    ) -> None:
        self._estimator = estimator
        self._admission = admission
        self._router = router
        self._capture = capture or CapturePoint()
        self._loader = loader
        self._settings = settings
        self._emit = emit

    async def handle(
        self,
        request: ProxyRequest,
        client_response: RequestWriter,
        turn: StoredTurn | None = None,
    ) -> None:
        """Answer a request; `turn` stores a response of the Responses API.

        Raises:
            ConnectionError: The client left before its response was complete.
            TooManyRequests: Its key has used up its tokens.
            WaitTooLong: It would wait longer than its client does.
            ProxyError: No instance accepted it, or none completed its response.
        """
        with contextlib.ExitStack() as stack:
            if self._admission and (key := self._admission.keys.limited.get(request.client)):
                tokens = request.prompt.tokens if request.prompt else 0
                stack.enter_context(self._admission.tokens.reserve(key, tokens, request.json))
                request = replace(request, max_context=key.max_context)
            if request.wait_s or self._estimator.is_due:
                stack.enter_context(self._estimator.observe(request, client_response.record))
            if array := array_of(request):
                await forward_parts(array, client_response, self._forward_part)
            else:
                await self._forward_whole(request, client_response, turn)

    async def _forward_part(self, request: ProxyRequest, part: ResponseWriter) -> None:
        await self._forward_any(request, plan_request(request), part)

    async def _forward_whole(
        self, request: ProxyRequest, client_response: RequestWriter, turn: StoredTurn | None
    ) -> None:
        request, client_response = translate_request(request, client_response, turn)
        plan = plan_request(request)
        if plan.is_passed_stream:
            client_response.start_pings(request.kind)
        try:
            if "tools" in request.json and (call := call_request(request)):
                await self._forward_call(request, call, client_response)
            else:
                await self._forward_any(request, plan, client_response)
        finally:
            await client_response.cancel_pings()

    async def _forward_call(
        self, request: ProxyRequest, call: ProxyRequest, client_response: ResponseWriter
    ) -> None:
        """Answer a request with tools and a format; `call` is the request without the format."""
        if requires_call(request):
            await self._forward_any(call, plan_request(call), client_response)
            return
        held, record = HeldResponse(client_response, call), client_response.record
        with contextlib.suppress(AnswerBegan):
            await self._forward_any(call, plan_request(call), held)
        if held.is_call:
            return
        discarded = record.forget_answer()
        answer = answer_request(request)
        await self._forward_any(answer, plan_request(answer), client_response)
        if discarded and record.timings:
            record.timings = record.timings.with_discarded(discarded)

    async def _forward_any(
        self, request: ProxyRequest, plan: UpstreamRequestPlan, client_response: ResponseWriter
    ) -> None:
        """Forward a request, and show the exchange to the observer of a running capture."""
        observer = self._capture.observer
        exchange = observer.observe(request) if observer else None
        if exchange is None:
            await self._forward_one(request, plan, client_response)
            return
        failure: BaseException | None = None
        try:
            await self._forward_one(request, plan, CapturedResponse(client_response, exchange))
        except BaseException as error:
            failure = error
            raise
        finally:
            exchange.end(client_response.record, failure)

    async def _forward_one(
        self, request: ProxyRequest, plan: UpstreamRequestPlan, client_response: ResponseWriter
    ) -> None:
        try:
            await self._request(request, plan, client_response)
        except _RETRIED as error:
            if isinstance(error, _REFUSALS):
                raise
            if not client_response.is_committed:
                await self._request(request, plan, client_response, avoid=(error.instance,))
            elif isinstance(error, _HARMLESS):
                await self._continue(request, client_response, error)
            else:
                raise

    async def _continue(
        self,
        request: ProxyRequest,
        client_response: ResponseWriter,
        error: TrialCrashed | UpstreamKilled,
    ) -> None:
        """Let another instance continue an answer; raises the error if none can."""
        unfinished = error.unfinished
        if unfinished is None:
            raise error
        for rest, is_replay in continuations(request, unfinished):
            writer = ContinuedResponse(client_response, unfinished, is_replay=is_replay)
            try:
                await self._request(rest, plan_request(rest), writer, avoid=(error.instance,))
            except AnswerDiffers:
                continue
            client_response.record.continued += 1
            return
        raise error

    async def _request(
        self,
        request: ProxyRequest,
        plan: UpstreamRequestPlan,
        client_response: ResponseWriter,
        avoid: Collection[str] = (),
    ) -> None:
        """Send to an instance, then to others while instances are silent or refuse the request."""
        for _ in range(_MOVES_MAX):
            try:
                await self._attempt(request, plan, client_response, avoid)
            except (UpstreamSilent, *_REFUSALS) as error:
                if error.instance in avoid and isinstance(error, _REFUSALS):
                    raise  # there is no other
                avoid = (*avoid, error.instance)
            else:
                return
        await self._attempt(request, plan, client_response, avoid)

    async def _attempt(
        self,
        request: ProxyRequest,
        plan: UpstreamRequestPlan,
        client_response: ResponseWriter,
        avoid: Collection[str] = (),
    ) -> None:
        lease: Lease | None = None
        record = client_response.record
        record.timeline.wait()
        try:
            load = TimedLoader(self._loader, record.timeline).ensure_ready
            async with self._router.lease(request, avoid, load) as lease:
                record.timeline.begin_prefill(lease.began_at_s)
                client_response.note_lease(lease)
                if has_chunks(lease):
                    await PrefillChunks(lease, self._router, self._settings).compute()
                record.slot = lease.slot_number
                if not await self._exchange(plan, lease, client_response):
                    await self._router.send_again(lease)
                    await self._exchange(plain_plan(request), lease, client_response)
        except (UpstreamFailed, UpstreamTimeout) as error:
            if lease is not None and not isinstance(error, UpstreamShutDown):
                record.emit_upstream_failure(self._emit, error)
            if lease is not None and isinstance(error, _HARMLESS):
                error.unfinished = lease.unfinished
            raise
        finally:
            record.timeline.end_wait() if lease is None else record.timeline.end_lease()

    async def _exchange(
        self, plan: UpstreamRequestPlan, lease: Lease, client_response: ResponseWriter
    ) -> bool:
        """Send the request once; return False if it must be sent again (`ResponseRelay.run`)."""
        is_cache_off = lease.is_cache_off and lease.request.kind.generates
        body = plan.with_slot(lease.id_slot, is_cache_off=is_cache_off)
        headers = lease.request.headers.copy()
        headers["X-Request-Id"] = lease.request.request_id
        upstream_request = UpstreamRequest(
            lease.request.method, lease.request.path, lease.request.query, headers, body
        )
        if node := lease.upstream.node:
            upstream_request = await readdress(upstream_request, node, lease.request)
        lease.note_sent()
        async with send(lease.upstream, upstream_request, self._settings) as response:
            lease.note_header()
            relay = ResponseRelay(self._router, plan, lease, response, client_response)
            return await relay.run()
