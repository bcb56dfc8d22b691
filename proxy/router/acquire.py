"""The waits of a request, by events and no longer than its queue timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Final, Protocol

from proxy.errors import ModelLoading, ProxyError, QueueTimeout, Unavailable
from proxy.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.router.model_queue import ModelQueue
from proxy.router.queued_request import QueuedRequest

_RETRY_AFTER_LOAD_S: Final = 10


class Loader(Protocol):
    async def ensure_ready(self, model: str, /) -> None:
        """As `proxy.models.ModelLoader.ensure_ready`."""


async def acquire_slot(queue: ModelQueue, queued: QueuedRequest, loader: Loader | None) -> Lease:
    """Lease a slot of one of the instances, after a wait in the queue if need be.

    Raises:
        QueueFull: Too many requests wait already.
        QueueTimeout: No slot became free in time.
        ModelLoading: No instance was ready in time.
        Unavailable: No instance is ready, and none will be; the loader may raise its own errors.
    """
    if lease := queue.bypass(queued):
        return lease
    try:
        queue.join(queued)
        if queued.lease is None:
            async with _queue_deadline(queue, queued.request):
                await _wait(queue, queued, loader)
        return queue.begin(queued)
    finally:
        queue.remove(queued)


async def ensure_serving(queue: ModelQueue, request: ProxyRequest, loader: Loader | None) -> None:
    """Return once an instance is ready; raises as `acquire_slot` does."""
    if not queue.serves(request):
        async with _queue_deadline(queue, request):
            while not queue.serves(request):
                await _load(queue, request, loader)


async def _wait(queue: ModelQueue, queued: QueuedRequest, loader: Loader | None) -> None:
    while queued.lease is None:
        queued.wake.clear()
        if queue.serves(queued.request):
            await queued.wake.wait()
        else:
            await _load_unless_assigned(queue, queued, loader)


async def _load_unless_assigned(
    queue: ModelQueue, queued: QueuedRequest, loader: Loader | None
) -> None:
    """Load the model, unless a slot becomes free first."""
    async with asyncio.TaskGroup() as first:
        woken = first.create_task(queued.wake.wait())
        loading = first.create_task(_error_of(_load(queue, queued.request, loader)))
        await asyncio.wait((woken, loading), return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        loading.cancel()
    error = None if loading.cancelled() else loading.result()
    if error and queued.lease is None:
        raise error


async def _error_of(wait: Coroutine[None, None, None]) -> ProxyError | None:
    """Return the error of a wait: a task group would wrap it."""
    try:
        await wait
    except ProxyError as error:
        return error
    return None


async def _load(queue: ModelQueue, request: ProxyRequest, loader: Loader | None) -> None:
    """Load the model, unless another proxy forwarded the request: it has other machines."""
    before = queue.admissions
    if loader and not request.is_from_proxy:
        await loader.ensure_ready(queue.model)
    if not queue.serves(request) and queue.admissions == before:
        raise Unavailable(f"no instance of {queue.model} is ready; retry later")


@asynccontextmanager
async def _queue_deadline(queue: ModelQueue, request: ProxyRequest) -> AsyncIterator[None]:
    limit = asyncio.timeout(request.queue_timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        if not queue.serves(request):
            sentence = f"{queue.model} is still loading; retry later"
            raise ModelLoading(sentence, _RETRY_AFTER_LOAD_S) from None
        waited = f"timed out after {request.queue_timeout_s:g} s waiting for a free slot"
        sentence = f"{waited} of {queue.model}; retry later"
        raise QueueTimeout(sentence, queue.retry_after_s) from None
