"""Background requests on a serving engine; clients preempt them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from proxy.router.instances import Activity


class Preempted(Exception):
    """A client needs the leased slot, or the instance is stopping."""


class BackgroundLeases(Protocol):
    """Grants a slot of a serving instance to our own requests, until a client needs it."""

    def activity(self, name: str, /) -> Activity:
        """Cheap enough to be called several times a second."""

    def background_lease(self, name: str, /) -> AbstractAsyncContextManager[Callable[[], bool]]:
        """Hold one slot of an instance for the length of the block.

        The block gets a function that returns whether a client needs the slot; it must then raise
        Preempted soon.

        Raises:
            ProxyError: No slot was free, or the instance is stopping.
        """


TICK_S: Final = 0.1


async def run_until_preempted(
    work: Coroutine[Any, Any, None], is_wanted: Callable[[], bool]
) -> None:
    """Run `work`, and cancel it as soon as a client needs the slot.

    Raises:
        Preempted: A client needs the slot; the engine continues to the end of its batch.
        ExceptionGroup: Raised by the work.
    """
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        while not is_wanted():
            done, _ = await asyncio.wait([task], timeout=TICK_S)
            if done:
                return
        task.cancel()
    raise Preempted
