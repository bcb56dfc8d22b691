"""Work of our own on an engine that serves: it is left as soon as somebody wants the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from supervisor.life.traffic import NotLent

TICK_S: Final = 0.1


async def finish(work: Coroutine[Any, Any, None], is_wanted: Callable[[], bool]) -> None:
    """Do some work, or leave it when somebody comes.

    Args:
        work: What is done.
        is_wanted: Tells that somebody came; as `Traffic.lend` gives it.

    Raises:
        NotLent: Somebody came; the engine goes on to the end of its batch.
        ExceptionGroup: What the work raised.
    """
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        while not is_wanted():
            done, _ = await asyncio.wait([task], timeout=TICK_S)
            if done:
                return
        task.cancel()
    raise NotLent
