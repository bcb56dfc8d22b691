"""Background requests on a serving engine; clients preempt them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol


@dataclass(frozen=True, slots=True)
class Activity:
    """An instance's activity for clients.

    Attributes:
        in_flight: Its requests.
        awaited: Those of them that wait for the engine; the others wait for a slow client.
        bytes_seen: Response bytes received from it so far. Only a change has a meaning.
        is_silent: Whether requests were moved elsewhere because it does not answer `/health`.
    """

    in_flight: int = 0
    awaited: int = 0
    bytes_seen: int = 0
    is_silent: bool = False


class LeaseUnavailable(Exception):
    """No slot was free, a client needs the leased one, or the instance is stopping."""


class BackgroundLeases(Protocol):
    """Grants a slot of a serving instance to our own requests, until a client needs it."""

    def activity(self, name: str, /) -> Activity:
        """Cheap enough to be called several times a second."""

    def background_lease(self, name: str, /) -> AbstractAsyncContextManager[Callable[[], bool]]:
        """Hold one slot of an instance for the length of the block.

        The block gets a function that returns whether a client needs the slot; it must then raise
        LeaseUnavailable soon.

        Raises:
            LeaseUnavailable: No slot was free, or the instance is stopping.
        """


TICK_S: Final = 0.1


async def run_until_preempted(
    work: Coroutine[Any, Any, None], is_wanted: Callable[[], bool]
) -> None:
    """Run `work`, and cancel it as soon as a client needs the slot.

    Raises:
        LeaseUnavailable: A client needs the slot; the engine continues to the end of its batch.
        ExceptionGroup: Raised by the work.
    """
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        while not is_wanted():
            done, _ = await asyncio.wait([task], timeout=TICK_S)
            if done:
                return
        task.cancel()
    raise LeaseUnavailable
