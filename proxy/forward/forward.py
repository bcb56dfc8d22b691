"""Forwards a request: leases an instance, exchanges request and response, and retries if safe.

`proxy/DESIGN.md` says what follows each failure. A retry goes to another instance, or to the same
one if there is no other. A request is not retried after its engine crashed, as it may have caused
the crash; if that engine is on trial, the trial is suspected first, and the request is retried. The
same holds for an engine's own error. `second_request` continues a plain chat. A client that leaves
closes the upstream connection at once. Each prompt of an array is a separate request, and so is
each answer if one instance has too few slots for all (`arrays`). A request for a node gets the
node's name of the model and a header that marks it, so that no two proxies forward it in a loop.

    error                                        then
    UpstreamConnectFailed, UpstreamShutDown      ONCE: one retry before the first byte
    UpstreamKilled, TrialCrashed                 CONTINUE: as ONCE; later, the rest is requested
    UpstreamSilent                               MOVE: to another, up to 4 times; then as ONCE
    NodeUnconnected, UpstreamUnavailable         ELSEWHERE: to another, up to 4 times, each once
    all others                                   NEVER: the client gets the error
    those with `falls_back`, before the first byte, after all retries: the next model
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Awaitable, Collection, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl, urlencode

import orjson
from multidict import CIMultiDict

from proxy.auth.api_keys import Admission
from proxy.auth.keys_file import Key
from proxy.common.headers import CACHE_OWNER, EVENT_STREAM, HOLDER, HOP, JSON, PRIORITY, for_client
from proxy.errors import (
    ProxyError,
    Retry,
    ToolCallBroken,
    Unfinished,
    UpstreamFailed,
    UpstreamShutDown,
    UpstreamTimeout,
)
from proxy.forward import second_request, tool_calls
from proxy.forward.anthropic import MessageEvents, as_chat
from proxy.forward.arrays import Fork, array_of, fork_of, forward_parts
from proxy.forward.inspection import Captured, CapturePoint, Exchange
from proxy.forward.openai_responses import completed_response
from proxy.forward.prefill import PrefillChunks, has_chunks
from proxy.forward.relay import ResponseRelay, UpstreamRequestPlan, is_passed_stream, plan_request
from proxy.forward.response import Discarded, Response
from proxy.forward.tool_calls import HistoryRefused
from proxy.http.forms import Form
from proxy.observe.record import Emit, Timeline
from proxy.request import variants
from proxy.request.models import ModelLoader, variant_end
from proxy.request.request import KEEP_ALIVE, Priority, ProxyRequest, encode_members
from proxy.request.stored_responses import StoredTurn
from proxy.request.tools import with_mended_history
from proxy.router.estimator import Estimator
from proxy.router.lease import Lease, SlotYielded
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, UpstreamResponse
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import InvalidEvent
from proxy.upstream.upstream import Node

# Silent instances and refusing nodes that a request leaves for others.
_MOVES_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Tries:
    """How a request was tried so far; `moves` counts the instances that it left for others."""

    avoid: tuple[str, ...] = ()
    moves: int = 0
    is_second: bool = False


_FIRST_TRY: Final = Tries()
# After these, the rest of an answer, or all of it, may be requested.
_CONTINUED: Final = (UpstreamFailed, SlotYielded, second_request.AnswerDiffers)


def next_try(error: UpstreamFailed, tries: Tries, *, is_committed: bool) -> Tries | None:
    """Return how to try again after an error; None if the client gets it. The table is above."""
    retry, instance = error.retry, error.instance
    if retry is Retry.ELSEWHERE and instance in tries.avoid:
        return None  # there is no other
    if retry in {Retry.MOVE, Retry.ELSEWHERE} and tries.moves < _MOVES_MAX:
        return replace(tries, avoid=(*tries.avoid, instance), moves=tries.moves + 1)
    if retry in {Retry.NEVER, Retry.ELSEWHERE} or tries.is_second or is_committed:
        return None
    return Tries((instance,), is_second=True)


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
        process: str = "",
    ) -> None:
        self._process = process  # identifies this process for nodes
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
        response: Response,
        turn: StoredTurn | None = None,
        others: Iterator[Awaitable[ProxyRequest]] | None = None,
    ) -> ProxyRequest:
        """Answer a request, and return it, or the request of `others` that was answered instead.

        `turn` stores a response of the Responses API.

        Raises:
            ConnectionError: The client left before its response was complete.
            TooManyRequests: Its key has used up its tokens.
            WaitTooLong: It would wait longer than its client does.
            ProxyError: No instance accepted it, or none completed its response; the first error if
                no other model can be served either.
        """
        first_error: ProxyError | None = None
        while True:
            try:
                await self._handle(request, response, turn)
            except ProxyError as error:
                if response.is_committed or not error.falls_back:
                    raise
                first_error = first_error or error
                if (other := next(others or iter(()), None)) is None:
                    raise first_error  # noqa: B904 (it has its own cause)
            else:
                return request
            request = await other

    def _handle(
        self, request: ProxyRequest, response: Response, turn: StoredTurn | None
    ) -> Awaitable[None]:
        key = self._admission.keys.limited.get(request.client) if self._admission else None
        is_estimated = request.wait_s is not None or self._estimator.is_due
        if request.kind is EndpointKind.CHAT and not (key or is_estimated):  # most requests
            return self._answer(request, response)
        return self._handle_special(request, response, turn, key, is_estimated=is_estimated)

    async def _handle_special(
        self,
        request: ProxyRequest,
        response: Response,
        turn: StoredTurn | None,
        key: Key | None,
        *,
        is_estimated: bool,
    ) -> None:
        """Answer a request that is estimated, limited by its key, or for another API than chat."""
        with contextlib.ExitStack() as stack:
            if self._admission and key:
                tokens = request.prompt.tokens if request.prompt else 0
                stack.enter_context(self._admission.tokens.reserve(key, tokens, request.json))
                request = replace(request, max_context=key.max_context)
            if is_estimated:
                stack.enter_context(self._estimator.observe(request, response.record))
            if request.kind is not EndpointKind.CHAT and (array := array_of(request)):
                if is_passed_stream(request):
                    response.start_pings()
                await forward_parts(array, response, self._forward)
                return
            if request.kind is EndpointKind.RESPONSES:
                stack.enter_context(response.through(completed_response(request, turn)))
            elif request.kind is EndpointKind.MESSAGES and (chat := as_chat(request)):
                request = chat
                stack.enter_context(response.through(MessageEvents()))
            await self._answer(request, response)

    async def _answer(self, request: ProxyRequest, response: Response) -> None:
        is_stream = is_passed_stream(request)
        if is_stream:
            response.start_pings()
        try:
            if request.slots > 1 and (fork := await self._fork(request, response)):
                await forward_parts(fork, response, self._forward_branch)
            elif "tools" in request.json:
                await self._forward_with_tools(request, response)
            elif self._capture.observe:
                await self._forward(request, response)
            else:
                await self._try_instances(request, response)
        except HistoryRefused as refused:
            await response.cancel_pings()
            response.record.count_calls("history", refused.count)
            await self._answer(refused.request, response)
        finally:
            if is_stream:
                await response.cancel_pings()

    async def _fork(self, request: ProxyRequest, response: Response) -> Fork | None:
        """Return how to split a request for more answers than an instance has slots, or None."""
        queue = self._router.queues[request.model]
        if request.may_load and not queue.serves(request):
            timeline = response.record.timeline
            timeline.wait()
            try:
                await queue.ensure_serving(request, functools.partial(self._load, timeline))
            finally:
                timeline.end_wait()
        return fork_of(request, self._router.registry.of_model(request.model).in_service)

    async def _forward_branch(self, request: ProxyRequest, response: Response) -> None:
        if "tools" not in request.json:
            await self._forward(request, response)
            return
        try:
            await self._forward_with_tools(request, response)
        except HistoryRefused as refused:
            response.record.count_calls("history", refused.count)
            await self._forward_branch(refused.request, response)

    async def _forward_with_tools(self, request: ProxyRequest, response: Response) -> None:
        if call := second_request.call_request(request):
            await self._forward_call(request, call, response)
        else:
            await self._forward_checked(request, response)

    async def _forward_call(
        self, request: ProxyRequest, call: ProxyRequest, response: Response
    ) -> None:
        """Answer a request with tools and a format; `call` is the request without the format."""
        if request.json.get("tool_choice") == "required":
            await self._forward_checked(call, response)
            return
        call_only = second_request.CallOnly(call)
        with response.through(call_only), contextlib.suppress(Discarded):
            await self._forward_checked(call, response)
        if call_only.is_call:
            return
        record = response.record
        discarded = record.forget_answer()
        await self._forward(second_request.answer_request(request), response)
        if discarded and record.timings:
            record.timings = record.timings.with_discarded(discarded)

    async def _forward_checked(self, request: ProxyRequest, response: Response) -> None:
        """Answer a request, and repair the calls of its answer if it wants that."""
        if request.call_retries is None or request.slots > 1:
            await self._forward(request, response)
            return
        record = response.record
        request, count = with_mended_history(request)
        record.count_calls("history", count)
        checked = tool_calls.CheckedCalls(request)
        with response.through(checked):
            await self._forward(request, response)
        if checked.broken:
            response.note_pause()
            for call in checked.broken:
                await self._generate_again(call, checked, request, response)
            record.status, record.code = HTTPStatus.OK, None
            content_type = EVENT_STREAM if checked.is_stream else JSON
            headers = for_client(CIMultiDict({"Content-Type": content_type}))
            await response.begin(HTTPStatus.OK, headers)
            await response.finish(checked.rest())
        record.count_calls("repaired", checked.mended)

    async def _generate_again(
        self,
        call: tool_calls.Call,
        checked: tool_calls.CheckedCalls,
        request: ProxyRequest,
        response: Response,
    ) -> None:
        """Generate one call again until it is right; raises ToolCallBroken after the last try."""
        record, retries = response.record, request.call_retries or 0
        for attempt in range(retries):
            gathered = tool_calls.Gathered(response)
            await self._forward(checked.request_for(call, attempt), gathered)
            record.add(gathered.record)
            checked.take(call, gathered.status, gathered.body)
            if not call.fault:
                record.count_calls("regenerated", 1)
                return
        record.count_calls("failed", 1)
        raise ToolCallBroken(call.name, call.fault, retries)

    def _forward(self, request: ProxyRequest, response: Response) -> Awaitable[None]:
        """Forward a request, and show the exchange to a running capture."""
        observe = self._capture.observe
        if observe and (exchange := observe(request)):
            return self._forward_captured(request, response, exchange)
        return self._try_instances(request, response)

    async def _forward_captured(
        self, request: ProxyRequest, response: Response, exchange: Exchange
    ) -> None:
        failure: BaseException | None = None
        try:
            with response.through(Captured(exchange)):
                await self._try_instances(request, response)
        except BaseException as error:
            failure = error
            raise
        finally:
            exchange.end(response.record, failure)

    async def _try_instances(self, request: ProxyRequest, response: Response) -> None:
        """Try instances until one completes the response.

        An answer that broke off is continued on another instance, an answer that yielded its slot
        on any.
        """
        if request.priority == "batch" and self._settings.batch_yields:
            request = replace(request, may_yield=second_request.may_yield(request))
        plan = plan_request(request)
        try:
            await self._attempt(request, plan, response)
        except _CONTINUED as error:
            requests = _Requests(request, plan, response)
            requests.go_on(error)
        else:
            return  # as nearly always
        while True:
            tries, yielded = requests.tries, requests.yielded
            try:
                await self._attempt(requests.latest, requests.plan, response, tries, yielded)
            except _CONTINUED as error:
                requests.go_on(error)
            else:
                response.record.continued += requests.is_continued
                response.record.add_parts()
                return

    async def _attempt(
        self,
        request: ProxyRequest,
        plan: UpstreamRequestPlan,
        response: Response,
        tries: Tries = _FIRST_TRY,
        yielded: SlotYielded | None = None,
    ) -> None:
        lease: Lease | None = None
        record = response.record
        record.timeline.wait("paused" if yielded else "queued")
        try:
            load = functools.partial(self._load, record.timeline)
            async with self._router.lease(request, tries.avoid, load, yielded) as lease:
                record.timeline.begin_prefill(lease.began_at_s, lease.slots_s)
                response.note_lease(lease)
                if has_chunks(lease):
                    await PrefillChunks(lease, self._router, self._settings).compute()
                elif lease.beginning_blocks:
                    await PrefillChunks(lease, self._router, self._settings).compute_beginning()
                record.slot = lease.slot_number
                if not await self._exchange(plan, lease, response):
                    await self._router.send_again(lease)
                    await self._exchange(UpstreamRequestPlan(request.body), lease, response)
        except (UpstreamFailed, UpstreamTimeout) as error:
            if lease is not None and not isinstance(error, UpstreamShutDown):
                record.emit_upstream_failure(self._emit, error)
            if lease is not None and isinstance(error, UpstreamFailed):
                error.unfinished = lease.unfinished
            raise
        finally:
            record.timeline.end_wait() if lease is None else record.timeline.end_lease()

    async def _load(self, timeline: Timeline, model: str) -> None:
        """Load a model, and record in the timeline how long eviction and loading take."""
        timeline.wait("evict")
        try:
            begin_load = functools.partial(timeline.wait, "load")
            timeline.load_cause = await self._loader.ensure_ready(model, begin_load)
        finally:
            timeline.wait()

    async def _exchange(self, plan: UpstreamRequestPlan, lease: Lease, response: Response) -> bool:
        """Send the request once; return False if it must be sent again (`ResponseRelay.run`)."""
        request, upstream = lease.request, lease.upstream
        is_cache_off = lease.is_cache_off and request.kind.generates
        body = plan.with_slot(lease.id_slot, is_cache_off=is_cache_off)
        sent = UpstreamRequest(
            request.method, request.path, request.query, request.headers, body, request.request_id
        )
        if node := upstream.node:
            sent = await readdress(sent, node, request)
            if node.process and lease.holder is not None:
                sent.headers[HOLDER] = lease.holder or self._process
        lease.is_reported = False
        try:
            async with UpstreamResponse(upstream, sent, self._settings) as received:
                lease.note_header()
                return await ResponseRelay(self._router, plan, lease, received, response).run()
        except InvalidEvent as error:
            raise UpstreamFailed(f"{upstream.name} sent a broken stream: {error}") from error


class _Requests:
    """The requests for one answer: the client's, and those for the rest of the answer.

    Attributes:
        latest: The request to send now.
        yielded: How it yielded its last slot, or None.
    """

    def __init__(
        self, request: ProxyRequest, plan: UpstreamRequestPlan, response: Response
    ) -> None:
        self.latest = self._first = request
        self.plan = plan
        self.tries = _FIRST_TRY
        self.yielded: SlotYielded | None = None
        self._response = response
        self._continuation: second_request.Continuation | None = None
        self._rests: Iterator[tuple[ProxyRequest, second_request.Continuation | None]] = iter(())

    @property
    def is_continued(self) -> bool:
        """Whether another engine continues an answer that broke off."""
        return self._continuation is not None and self.tries.is_second

    def go_on(self, error: Exception) -> None:
        """Set the next request after an error; raise the error if there is none."""
        if isinstance(error, UpstreamFailed):
            is_committed = self._response.is_committed
            if further := next_try(error, self.tries, is_committed=is_committed):
                self.tries = further
                return
            self._begin_rests(error, is_committed=is_committed)
        elif isinstance(error, SlotYielded):
            self.yielded = error
            self._response.record.note_yield(error.timings)
            self._response.note_pause()
            answer = self._so_far(error.unfinished)
            rests = second_request.resumptions(self._first, self._response.record, answer)
            self._rests = rests if answer.text else iter([(self._first, None)])
        else:
            self.tries = replace(self.tries, avoid=self.tries.avoid[:1], moves=0)
        if self._continuation:
            self._response.remove(self._continuation)
            self._continuation = None
        if (rest := next(self._rests, None)) is None:
            raise error
        self.latest, self._continuation = rest
        if self._continuation:
            self._response.add(self._continuation)
        self.plan = plan_request(self.latest, is_rest=self.yielded is not None)

    def _begin_rests(self, error: UpstreamFailed, *, is_committed: bool) -> None:
        """Prepare the requests with which others can continue a broken answer, or none."""
        self._rests = iter(())
        is_final = self.tries.is_second or error.retry is not Retry.CONTINUE
        self.tries = Tries((error.instance,), is_second=True)
        if is_committed and error.unfinished and not is_final:
            answer = self._so_far(error.unfinished)
            self._rests = second_request.continuations(self._first, self._response.record, answer)

    def _so_far(self, part: Unfinished) -> Unfinished:
        return self._continuation.so_far(part) if self._continuation else part


_LARGE_BYTES: Final = 1024**2


async def readdress(
    upstream_request: UpstreamRequest, node: Node, request: ProxyRequest
) -> UpstreamRequest:
    """Rewrite a request for a node, and for the variant or adapter that it names.

    A body of more than 1 MiB is rewritten in a thread.
    """
    if request.remote_variant:
        node = replace(node, model=node.model + variant_end(request.remote_variant))
    elif request.adapter:
        node = replace(node, model=f"{node.model}{variants.MARK}{request.adapter}")
    if request.owner.is_alone and node.takes_keep_alive:  # another llama-corral
        headers = upstream_request.headers.copy()
        headers[CACHE_OWNER] = request.owner.digest
        upstream_request = replace(upstream_request, headers=headers)
    # The ids of adapters are those of this machine.
    omitted = () if request.adapter is None else (variants.MEMBER,)
    options = node, request.form, request.priority, omitted, request.keep_alive_s
    rewrite = functools.partial(for_node, upstream_request, *options)
    if len(upstream_request.body) <= _LARGE_BYTES:
        return rewrite()
    return await asyncio.to_thread(rewrite)


def for_node(
    upstream_request: UpstreamRequest,
    node: Node,
    form: Form | None = None,
    priority: Priority = "interactive",
    omitted: Collection[str] = (),
    keep_alive_s: float | None = None,
) -> UpstreamRequest:
    """Rewrite a request, whose body is empty, a JSON object or `form`, for a node.

    A batch request from here queues behind the node's own interactive requests. The members
    `omitted` are left out of a JSON object. Another llama-corral gets `keep_alive`, so it keeps its
    model loaded for as long. Raises BadRequest: the body is nested too deeply to be serialised
    again.
    """
    headers = upstream_request.headers.copy()
    headers[HOP] = "1"
    if priority == "batch":
        headers[PRIORITY] = priority
    if form:
        body = form.with_model(node.model).encode()
    else:
        changes: dict[str, object] = {"model": node.model}
        if keep_alive_s is not None and node.takes_keep_alive:
            changes[KEEP_ALIVE] = -1 if math.isinf(keep_alive_s) else keep_alive_s
        if body := upstream_request.body:
            members = {**orjson.loads(body), **changes}
            kept = {name: value for name, value in members.items() if name not in omitted}
            body = encode_members(kept)
    pairs = parse_qsl(upstream_request.query, keep_blank_values=True)
    query = [pair for pair in pairs if pair[0] != "model"]
    if form or not body:  # the body does not name the model
        query.append(("model", node.model))
    return replace(upstream_request, headers=headers, query=urlencode(query), body=body)
