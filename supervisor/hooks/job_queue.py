"""Which commands run next. Bounded, without I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.hooks.hook_event import HookEvent

_WAITING_MAX: Final = 64
_RUNNING_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class HookJob:
    """An event and the commands that run for it, one after another; each has `timeout_s`."""

    event: HookEvent
    commands: tuple[tuple[str, ...], ...]
    timeout_s: float
    cwd: Path


class JobQueue:
    """Jobs in order of arrival; those for one subject never run at the same time."""

    def __init__(self) -> None:
        self._waiting: deque[HookJob] = deque()
        self._running: dict[str, HookJob] = {}
        self._dropped = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._running

    def add(self, job: HookJob) -> bool:
        """Return whether there was room; what finds none is counted."""
        if len(self._waiting) < _WAITING_MAX:
            self._waiting.append(job)
            return True
        self._dropped += 1
        return False

    def begin(self) -> HookJob | None:
        """Take the first job that may run now."""
        if len(self._running) >= _RUNNING_MAX:
            return None
        found = next((one for one in self._waiting if one.event.subject not in self._running), None)
        if found:
            self._waiting.remove(found)
            self._running[found.event.subject] = found
        return found

    def end(self, job: HookJob) -> None:
        del self._running[job.event.subject]

    @property
    def running(self) -> tuple[HookJob, ...]:
        return tuple(self._running.values())

    def drop_waiting(self) -> None:
        self._dropped += len(self._waiting)
        self._waiting.clear()

    def take_dropped(self) -> int:
        """Return how many were dropped since the last call."""
        count, self._dropped = self._dropped, 0
        return count
