"""`POST /v1/batch/completions`, `/batch/generate`: many prompts, each a request of priority batch.

They begin in their order, and one of them at a time waits for a slot, or for the limits of its key:
a batch has one place in the queue of its model, and takes slots that interactive requests leave
idle. A client that leaves cancels them all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from aiohttp import web

from proxy.batch import prompts
from proxy.batch.batch_queue import BatchQueue, Turn
from proxy.batch.prompts import PromptBatch
from proxy.batch.requests import OwnAnswer, OwnRequests
from proxy.batch.result_writer import BatchRefused, ResultWriter, write_whole, writer_for
from proxy.batch.results import BatchStats, result_of, stats_of
from proxy.body.bodies import Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.endpoints import EndpointKind
from proxy.forward.client_response import ClientResponse
from proxy.headers import HOP
from proxy.models import ModelNames
from proxy.prompt_cache.prompt import CacheOwner
from proxy.request import cache_owner, client_of, named_model
from proxy.request_limits.check import check
from proxy.router.lease import Lease

_ENGINE_PATH: Final = "/completion"
# A client waits for its whole batch; each prompt queues between those of other requests.
_QUEUE_TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class _Sender:
    client: str
    names: ModelNames
    model: str
    request_id: str
    is_from_proxy: bool
    owner: CacheOwner


class BatchCompletions:
    """Answers the endpoints; their prompts gather in `queue`."""

    def __init__(self, own: OwnRequests, queue: BatchQueue) -> None:
        self._own = own
        self.queue = queue

    async def serve(
        self,
        request: web.BaseRequest,
        response: ClientResponse,
        share: Share,
        names: ModelNames,
        *,
        read_batch: Callable[[Mapping[str, Any], int], PromptBatch] = prompts.read_batch,
        make_writer: Callable[[str, ClientResponse], ResultWriter] = writer_for,
    ) -> None:
        """Answer a request.

        Args:
            request: Its body is read here.
            response: To the client.
            share: The client's share of memory for bodies.
            names: The models that the client may use.
            read_batch: Reads the members of the body; gets the most prompts that may be in it.
            make_writer: Gets the header `Accept`.

        Raises:
            ConnectionError: The client left.
            QueueFull: Too many prompts of the client wait already.
            ProxyError: As `read_body`, `read_batch` and `ModelNames.resolve` do.
        """
        body = await read_body(request, share)
        await check_complexity(body, share)
        members = await share.run(len(body), lambda: members_of(body))
        batch = read_batch(members, self.queue.config.queue_size)
        check(EndpointKind.LLAMA_COMPLETION, batch.shared, share.settings.limits)
        model = named_model(batch.shared) or request.query.get("model")
        sender = _Sender(
            client_of(request),
            names,
            names.resolve(model).model_info.id,
            response.record.request_id,
            HOP in request.headers,
            cache_owner(request, share.settings),
        )
        if model:
            batch = replace(batch, shared={**batch.shared, "model": model})
        writer = make_writer(",".join(request.headers.getall("Accept", ())), response)
        try:
            with self.queue.joined(sender.model, sender.client, len(batch.prompts)) as turns:
                await writer.begin()
                run = _Run(self._own, self.queue, batch, sender, writer)
                await run.run(turns)
        except BatchRefused as refused:
            await write_whole(response, refused.answer)
        else:
            await writer.finish(run.stats())


class _Run:
    """One batch."""

    def __init__(
        self,
        own: OwnRequests,
        queue: BatchQueue,
        batch: PromptBatch,
        sender: _Sender,
        writer: ResultWriter,
    ) -> None:
        self._own = own
        self._queue = queue
        self._batch = batch
        self._sender = sender
        self._writer = writer
        self._began_at_s = time.monotonic()
        self._total_tokens = 0
        self._gpu_layers: dict[int, int] = {}  # of the instance that answered, by prompt

    async def run(self, turns: Sequence[Turn]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, turn in enumerate(turns):
                    await turn.formed.wait()
                    self._queue.begin(self._sender.model, turn)
                    waits_no_more = asyncio.Event()
                    group.create_task(self._answer(index, turn, waits_no_more))
                    await waits_no_more.wait()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # as it is: a task group wraps it up

    def stats(self) -> BatchStats:
        return stats_of(
            len(self._batch.prompts),
            self._total_tokens,
            time.monotonic() - self._began_at_s,
            gpu_used=any(self._gpu_layers.values()),
        )

    async def _answer(self, index: int, turn: Turn, waits_no_more: asyncio.Event) -> None:
        try:
            answer = await self._send(index, waits_no_more.set)
        finally:
            waits_no_more.set()
        result = replace(
            result_of(index, answer, _ENGINE_PATH),
            batched=turn.batch.is_batch,
            batch_size=turn.batch.size if turn.batch.is_batch else 1,
            latency_ms=round((time.monotonic() - turn.joined_at_s) * 1000, 3),
        )
        self._total_tokens += result.num_generated
        await self._writer.add(result, answer)

    async def _send(self, index: int, waits_no_more: Callable[[], None]) -> OwnAnswer:
        def on_lease(lease: Lease) -> None:
            self._gpu_layers[index] = lease.upstream.gpu_layers
            waits_no_more()

        sender = self._sender
        return await self._own.answer(
            _ENGINE_PATH,
            self._batch.members(index),
            client=sender.client,
            names=sender.names,
            request_id=f"{sender.request_id}-{index}",
            requests=1 if index else 0,  # the request itself is the first
            limit_wait_s=_QUEUE_TIMEOUT_S,
            queue_timeout_s=_QUEUE_TIMEOUT_S,
            is_from_proxy=sender.is_from_proxy,
            is_let_in=True,
            owner=sender.owner,
            on_lease=on_lease,
        )
