"""An event loop whose time passes at once: when nobody can run, it is the next moment."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Leap(selectors.DefaultSelector):
    """Moves the loop's time instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise AssertionError("everybody waits for somebody else")
            self.now_s += timeout
        return found


class LeapLoop(asyncio.SelectorEventLoop):
    """A loop that is never idle; with nothing left to wait for it raises AssertionError."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        return self._leap.now_s


def leap(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a loop of its own, in no time."""
    with asyncio.Runner(loop_factory=LeapLoop) as runner:
        runner.run(main)
