"""Work of our own on an engine that serves: it is left as soon as somebody wants the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol


@dataclass(frozen=True, slots=True)
class Activity:
    """What an instance does for clients at one moment.

    Attributes:
        in_flight: Requests it holds.
        awaited: Those of them whose next bytes it owes; the others wait for a slow client.
        bytes_seen: Bytes of answers that came from it so far. Only a change of it means anything.
        is_silent: Whether requests were moved away because it does not answer `/health`.
    """

    in_flight: int = 0
    awaited: int = 0
    bytes_seen: int = 0
    is_silent: bool = False


class LeaseUnavailable(Exception):
    """An instance was not lent, or was asked back: clients want it, or it is to leave."""


class BackgroundLeases(Protocol):
    """Grants a slot of a serving instance to requests of our own, until a client needs it."""

    def activity(self, name: str, /) -> Activity:
        """Return what it does now; cheap enough to be asked several times a second."""

    def background_lease(self, name: str, /) -> AbstractAsyncContextManager[Callable[[], bool]]:
        """Hold one slot of an instance for the length of the block.

        The block gets a function that returns whether a client needs the instance. The client
        comes first: leave the block with LeaseUnavailable.

        Raises:
            LeaseUnavailable: No slot was free, or the instance is stopped.
        """


TICK_S: Final = 0.1


async def run_until_preempted(
    work: Coroutine[Any, Any, None], is_wanted: Callable[[], bool]
) -> None:
    """Do some work, or leave it when somebody comes.

    Args:
        work: What is done.
        is_wanted: Tells that somebody came; as `Traffic.background_lease` gives it.

    Raises:
        LeaseUnavailable: Somebody came; the engine goes on to the end of its batch.
        ExceptionGroup: What the work raised.
    """
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        while not is_wanted():
            done, _ = await asyncio.wait([task], timeout=TICK_S)
            if done:
                return
        task.cancel()
    raise LeaseUnavailable
