"""The waits of a request: for its turn, and for an instance to be up at all.

It waits by events only, and as long as its own patience lasts, whatever it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Final

from proxy.errors import Loading, ProxyError, Unavailable, WaitedLong
from proxy.line.lease import Lease
from proxy.line.pool import Pool
from proxy.line.waiter import Waiter
from proxy.loader import Loader
from proxy.request import Ask

_RETRY_AFTER_LOAD_S: Final = 10


async def turn(pool: Pool, waiter: Waiter, loader: Loader | None) -> Lease:
    """Return a slot of one of the instances, after a wait in line if need be.

    Raises:
        LineFull: Too many wait already.
        WaitedLong: The patience ended before the turn came.
        Loading: The patience ended before an instance was up.
        Unavailable: No instance is up, and none will be; so may the loader's own errors say.
    """
    pool.join(waiter)
    try:
        if waiter.lease is None:
            async with _patient(pool, waiter.ask):
                await _wait(pool, waiter, loader)
        pool.begin(waiter)
    finally:
        pool.leave(waiter)
    assert waiter.lease is not None  # noqa: S101 (for the type: _wait returns with one)
    return waiter.lease


async def served(pool: Pool, ask: Ask, loader: Loader | None) -> None:
    """Return once an instance is up; the errors are those of `turn`."""
    if not pool.serves(ask):
        async with _patient(pool, ask):
            while not pool.serves(ask):
                await _load(pool, ask, loader)


async def _wait(pool: Pool, waiter: Waiter, loader: Loader | None) -> None:
    while waiter.lease is None:
        waiter.woken.clear()
        if pool.serves(waiter.ask):
            await waiter.woken.wait()
        else:
            await _load_or_wake(pool, waiter, loader)


async def _load_or_wake(pool: Pool, waiter: Waiter, loader: Loader | None) -> None:
    """Have the model brought up, unless the turn comes before the loader knows."""
    async with asyncio.TaskGroup() as first:
        woken = first.create_task(waiter.woken.wait())
        loading = first.create_task(_error_of(_load(pool, waiter.ask, loader)))
        await asyncio.wait((woken, loading), return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        loading.cancel()
    error = None if loading.cancelled() else loading.result()
    if error and waiter.lease is None:
        raise error


async def _error_of(wait: Coroutine[None, None, None]) -> ProxyError | None:
    """Return what a wait failed with: a task group would wrap it."""
    try:
        await wait
    except ProxyError as error:
        return error
    return None


async def _load(pool: Pool, ask: Ask, loader: Loader | None) -> None:
    """Have the model brought up, unless another machine passed the request on: it has others.

    Raises:
        Unavailable: Nobody does, or who says it did has not.
    """
    before = pool.admissions
    if loader and not ask.is_hopped:
        await loader.ensure_ready(pool.model)
    if not pool.serves(ask) and pool.admissions == before:
        raise Unavailable(f"no instance of {pool.model} is ready; ask again")


@asynccontextmanager
async def _patient(pool: Pool, ask: Ask) -> AsyncIterator[None]:
    limit = asyncio.timeout(ask.patience_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        if not pool.serves(ask):
            sentence = f"{pool.model} is still loading; ask again"
            raise Loading(sentence, _RETRY_AFTER_LOAD_S) from None
        sentence = f"no slot of {pool.model} came free in {ask.patience_s:g} s; ask again"
        raise WaitedLong(sentence, pool.retry_after_s) from None
