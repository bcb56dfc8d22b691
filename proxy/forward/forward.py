"""Forwards a request: a lease, an exchange with the instance, one retry where that is safe.

An instance that refuses the connection, still loads its model, breaks off, is stopped or is killed
from outside before anything of its response was sent, is replaced once: by another, or by itself
if there is none. Never if its engine crashed, as the request may have been the cause, unless it is
on trial: then that is suspected first, as when it answers with an error of its own. What breaks
later breaks the response, except for a plain chat whose engine was killed from outside or crashed
on trial: another instance continues it (`second_request`). A client that leaves closes the upstream
connection at once.

An instance that sends no first byte and does not answer `/health` is left for another as soon as
that has a slot free. A node that takes nothing is left for others until one does. The prompts of an
array are requests of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from proxy.auth.key_limits import Admission
from proxy.common.headers import CACHE_OWNER
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
from proxy.forward.arrays import Part, PartRefused, Parts, PromptArray, array_of, parts_of
from proxy.forward.capture import CapturedResponse, CapturePoint
from proxy.forward.openai_responses import ResponsesWriter
from proxy.forward.prefill import PrefillChunks, has_chunks
from proxy.forward.relay import ResponseRelay
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
from proxy.forward.upstream_request import UpstreamRequestPlan, for_node, plain_plan, plan_request
from proxy.observe.record import Emit
from proxy.observe.timeline import Timeline
from proxy.request.models import ModelLoader, variant_end
from proxy.request.request import ProxyRequest
from proxy.request.stored_responses import StoredTurn
from proxy.request.variants import MARK, MEMBER
from proxy.router.estimator import Estimator
from proxy.router.lease import Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, send
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Node


class TimedLoader:
    __slots__ = ("_loader", "_timeline")

    def __init__(self, loader: ModelLoader, timeline: Timeline) -> None:
        self._loader = loader
        self._timeline = timeline

    async def ensure_ready(self, model: str) -> None:
        """As `ModelLoader.ensure_ready`."""
        self._timeline.wait("evict")
        try:
            await self._loader.ensure_ready(model, functools.partial(self._timeline.wait, "load"))
        finally:
            self._timeline.wait()


def translate_request(
    request: ProxyRequest, client_response: RequestWriter, turn: StoredTurn | None
) -> tuple[ProxyRequest, RequestWriter]:
    """Return what the engine is asked, and what makes the client's response of its own."""
    if request.kind is EndpointKind.RESPONSES:
        return request, ResponsesWriter(client_response, request, turn)
    if request.kind is EndpointKind.MESSAGES and (chat := as_chat(request)):
        return chat, MessagesWriter(client_response)
    return request, client_response


# An instance is left once in two seconds; with more of them silent than this, it is a failure.
_MOVES_MAX: Final = 4

# The request did no harm, as far as known.
_HARMLESS: Final = (TrialCrashed, UpstreamKilled)
_RETRIED: Final = (UpstreamConnectFailed, UpstreamShutDown, *_HARMLESS)
# A node has done nothing for the request.
_REFUSALS: Final = (NodeUnconnected, UpstreamUnavailable)
_LARGE_BYTES: Final = 1024**2


class Forward:
    def __init__(  # noqa: PLR0913 (what a request passes through)
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
        """Answer a request; `turn` stores the response where it is one of the Responses API.

        Raises:
            ConnectionError: The client left before its response was complete.
            TooManyRequests: Its key has used up its tokens.
            WaitTooLong: It would wait longer than its client does.
            ProxyError: No instance took it, or none answered to the end.
        """
        if self._admission and (key := self._admission.keys.limited.get(request.client)):
            tokens = request.prompt.tokens if request.prompt else 0
            with self._admission.tokens.reserved(key, tokens, request.json):
                limited = replace(request, max_context=key.max_context)
                await self._answer(limited, client_response, turn)
        else:
            await self._answer(request, client_response, turn)

    async def _answer(
        self, request: ProxyRequest, client_response: RequestWriter, turn: StoredTurn | None
    ) -> None:
        if request.wait_s is None and not self._estimator.is_due:
            await self._handle(request, client_response, turn)
            return
        with self._estimator.observed(request, client_response.record):
            await self._handle(request, client_response, turn)

    async def _handle(
        self, request: ProxyRequest, client_response: RequestWriter, turn: StoredTurn | None
    ) -> None:
        if array := array_of(request):
            await self._forward_parts(array, client_response)
            return
        request, client_response = translate_request(request, client_response, turn)
        plan = plan_request(request)
        if plan.is_passed_stream:
            client_response.keep_alive(request.kind)
        try:
            if "tools" in request.json and (call := call_request(request)):
                await self._forward_call(request, call, client_response)
            else:
                await self._forward_any(request, plan, client_response)
        finally:
            await client_response.end_wait()

    async def _forward_call(
        self, request: ProxyRequest, call: ProxyRequest, client_response: ResponseWriter
    ) -> None:
        """Answer a request with tools and a format; `call` is the same without the format."""
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
        forward = self._forward_captured if self._capture.observer else self._forward_one
        await forward(request, plan, client_response)

    async def _forward_captured(
        self, request: ProxyRequest, plan: UpstreamRequestPlan, client_response: ResponseWriter
    ) -> None:
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
        """Have another instance go on with an answer; raises the error if none can."""
        for rest in continuations(request, error.unfinished):
            plan, writer = plan_request(rest.request), ContinuedResponse(client_response, rest)
            try:
                await self._request(rest.request, plan, writer, avoid=(error.instance,))
            except AnswerDiffers:
                continue
            client_response.record.continued += 1
            return
        raise error

    async def _forward_parts(self, array: PromptArray, client_response: RequestWriter) -> None:
        """Answer the prompts of an array, as many at once as slots are leased for them.

        One of them at a time waits for a slot, so the request has one place in the queue.
        """
        is_stream = array.request.is_stream and array.request.kind.generates
        parts = parts_of(array, client_response)
        if is_stream:
            client_response.keep_alive(array.request.kind)
        try:
            await self._forward_all(array, parts)
            await parts.finish()
        except PartRefused as refused:
            await client_response.refuse(refused.status, refused.headers, refused.body)
        finally:
            await client_response.end_wait()

    async def _forward_all(self, array: PromptArray, parts: Parts) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for at in range(len(array.prompts)):
                    part = parts.part(at)
                    task = group.create_task(self._forward_part(array.part(at), part))
                    await _await_lease(part, task)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # as it is: a task group wraps it up

    async def _forward_part(self, request: ProxyRequest, part: Part) -> None:
        await self._forward_any(request, plan_request(request), part)
        part.end()

    async def _request(
        self,
        request: ProxyRequest,
        plan: UpstreamRequestPlan,
        client_response: ResponseWriter,
        avoid: Collection[str] = (),
    ) -> None:
        """Send to an instance, and to others instead of those that do not take the request."""
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
            loader = TimedLoader(self._loader, record.timeline)
            async with self._router.lease(request, avoid, loader) as lease:
                record.timeline.begin_prefill(lease.began_at_s)
                client_response.leased(lease)
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
        """Send the request once; return whether the client has its answer."""
        is_cache_off = lease.is_cache_off and lease.request.kind.generates
        body = plan.with_slot(lease.id_slot, is_cache_off=is_cache_off)
        headers = lease.request.headers.copy()
        headers["X-Request-Id"] = lease.request.request_id
        upstream_request = UpstreamRequest(
            lease.request.method, lease.request.path, lease.request.query, headers, body
        )
        if node := lease.upstream.node:
            upstream_request = await _readdress(upstream_request, node, lease.request)
        lease.note_sent()
        async with send(lease.upstream, upstream_request, self._settings) as response:
            lease.note_header()
            relay = ResponseRelay(self._router, plan, lease, response, client_response)
            return await relay.run()


async def _readdress(
    upstream_request: UpstreamRequest, node: Node, request: ProxyRequest
) -> UpstreamRequest:
    """Rewrite a request for a node; a large body in a thread."""
    if request.remote_variant:
        node = replace(node, model=node.model + variant_end(request.remote_variant))
    elif request.adapter:
        node = replace(node, model=f"{node.model}{MARK}{request.adapter}")
    if request.owner.is_alone and node.takes_keep_alive:  # another llama-corral
        upstream_request.headers[CACHE_OWNER] = request.owner.digest
    # The ids of adapters are those of this machine.
    omitted = () if request.adapter is None else (MEMBER,)
    options = node, request.form, request.priority, omitted, request.keep_alive_s
    rewritten = functools.partial(for_node, upstream_request, *options)
    if len(upstream_request.body) <= _LARGE_BYTES:
        return rewritten()
    return await asyncio.to_thread(rewritten)


async def _await_lease(part: Part, task: asyncio.Task[None]) -> None:
    """Return once an instance has a part, or its task is over."""
    task.add_done_callback(lambda _: part.is_leased.set())
    await part.is_leased.wait()
