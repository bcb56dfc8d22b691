"""An event loop with virtual time: where no task can run, it moves to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class _VirtualTime(selectors.DefaultSelector):
    """Moves the loop's time instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise AssertionError("every task waits for another one")
            self.now_s += timeout
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that never waits; without a timer left it raises AssertionError."""

    def __init__(self) -> None:
        self._virtual_time = _VirtualTime()
        super().__init__(self._virtual_time)

    def time(self) -> float:
        return self._virtual_time.now_s

    def run_in_executor(
        self, executor: object, func: Callable[..., _Result], *args: object
    ) -> asyncio.Future[_Result]:
        """Work at once: while a thread works, time must not move."""
        del executor
        future: asyncio.Future[_Result] = self.create_future()
        future.set_result(func(*args))
        return future


def run_in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)
