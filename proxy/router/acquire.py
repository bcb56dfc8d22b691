"""The waits of a request: for its turn, and for an instance to be up at all.

It waits by events only, and as long as its own patience lasts, whatever it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Final

from proxy.errors import ModelLoading, ProxyError, QueueTimeout, Unavailable
from proxy.models import ModelLoader
from proxy.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.router.model_queue import ModelQueue
from proxy.router.queued_request import QueuedRequest

_RETRY_AFTER_LOAD_S: Final = 10


async def acquire_slot(
    queue: ModelQueue, queued: QueuedRequest, loader: ModelLoader | None
) -> Lease:
    """Return a slot of one of the instances, after a wait in line if need be.

    Raises:
        QueueFull: Too many wait already.
        QueueTimeout: The patience ended before the turn came.
        Loading: The patience ended before an instance was up.
        Unavailable: No instance is up, and none will be; so may the loader's own errors say.
    """
    queue.join(queued)
    try:
        if queued.lease is None:
            async with _queue_deadline(queue, queued.request):
                await _wait(queue, queued, loader)
        queue.begin(queued)
    finally:
        queue.remove(queued)
    assert queued.lease is not None  # noqa: S101 (for the type: _wait returns with one)
    return queued.lease


async def ensure_serving(
    queue: ModelQueue, request: ProxyRequest, loader: ModelLoader | None
) -> None:
    """Return once an instance is up; the errors are those of `acquire_slot`."""
    if not queue.serves(request):
        async with _queue_deadline(queue, request):
            while not queue.serves(request):
                await _load(queue, request, loader)


async def _wait(queue: ModelQueue, queued: QueuedRequest, loader: ModelLoader | None) -> None:
    while queued.lease is None:
        queued.wake.clear()
        if queue.serves(queued.request):
            await queued.wake.wait()
        else:
            await _load_unless_assigned(queue, queued, loader)


async def _load_unless_assigned(
    queue: ModelQueue, queued: QueuedRequest, loader: ModelLoader | None
) -> None:
    """Have the model brought up, unless the turn comes before the loader knows."""
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
    """Return what a wait failed with: a task group would wrap it."""
    try:
        await wait
    except ProxyError as error:
        return error
    return None


async def _load(queue: ModelQueue, request: ProxyRequest, loader: ModelLoader | None) -> None:
    """Have the model brought up, unless another machine passed the request on: it has others.

    Raises:
        Unavailable: Nobody does, or who says it did has not.
    """
    before = queue.admissions
    if loader and not request.is_from_proxy:
        await loader.ensure_ready(queue.model)
    if not queue.serves(request) and queue.admissions == before:
        raise Unavailable(f"no instance of {queue.model} is ready; ask again")


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
            sentence = f"{queue.model} is still loading; ask again"
            raise ModelLoading(sentence, _RETRY_AFTER_LOAD_S) from None
        sentence = f"no slot of {queue.model} came free in {request.queue_timeout_s:g} s; ask again"
        raise QueueTimeout(sentence, queue.retry_after_s) from None
