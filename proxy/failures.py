"""Internal failures: counted, reported once a minute with a traceback, and retried.

`persist` is the only place that catches every exception of a task that runs as long as the daemon.
Counts and listener belong to the process, as in `logging`.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Protocol, TypeVar

from proxy.throttle import Throttle

_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 5.0
# After so long without a failure, the backoff starts again.
_LONG_S: Final = 60.0
_TRACEBACK_MAX: Final = 8 * 1024
_TEXT_MAX: Final = 1024
# Our tasks are few; loggers of libraries are not.
_TASKS_MAX: Final = 64

_Result = TypeVar("_Result")


class _Emit(Protocol):
    def __call__(self, name: str, /, **fields: object) -> None: ...


class Failures:
    """Failures since the start; `counts` is by task."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._emit: _Emit = lambda *_, **__: None
        self._throttle = Throttle(1, self._rest)

    def report_to(self, emit: _Emit) -> None:
        """Emit `task.failed` with `task`, `error`, `traceback` and `more`.

        `more` counts failures of the same cause that were not reported in the minute before.
        """
        self._emit = emit

    def begin(self, task: str) -> None:
        """Count the failures of a task from 0."""
        self._add(task, 0)

    def note(self, task: str, error: BaseException, message: str = "") -> None:
        """Count a failure; report it at most once a minute per cause."""
        self._add(task, 1)
        if self._throttle.admit((task, type(error).__name__, _place(error))):
            text = "".join(traceback.format_exception(error))[-_TRACEBACK_MAX:]
            self._report(task, f"{message}: {error!r}" if message else repr(error), text, 0)

    def warn(self, task: str, cause: str, message: str) -> None:
        """Report a warning at most once a minute, without counting it."""
        if self._throttle.admit((task, cause, "")):
            self._report(task, message, None, 0)

    def _add(self, task: str, count: int) -> None:
        is_known = task in self.counts or len(self.counts) < _TASKS_MAX
        self.counts[task if is_known else "other"] += count

    def _rest(self, cause: Hashable, count: int) -> None:
        task, error, _ = cause if isinstance(cause, tuple) else (str(cause), "", "")
        self._report(task, f"{error}: and {count} more in the last minute", None, count)

    def _report(self, task: str, error: str, text: str | None, more: int) -> None:
        self._emit("task.failed", task=task, error=error[:_TEXT_MAX], traceback=text, more=more)


FAILURES: Final = Failures()


class FailureHandler(logging.Handler):
    """Turns records of `logging` into failures, so that no library fills the log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # the format does not match the arguments
            message = str(record.msg)
        if record.exc_info and record.exc_info[1]:
            FAILURES.note(record.name, record.exc_info[1], message)
        else:
            FAILURES.warn(record.name, str(record.msg)[:_TEXT_MAX], message)


async def persist(task: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
    """Run work until it returns; restart it 0.1 to 5 s after an exception.

    `task` is its name in the log and in `/metrics`, a constant of few words.
    """
    clock, pause_s = asyncio.get_running_loop().time, _FIRST_PAUSE_S
    FAILURES.begin(task)
    while True:
        began_at_s = clock()
        try:
            return await work()
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note(task, error)
        if clock() - began_at_s > _LONG_S:
            pause_s = _FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _place(error: BaseException) -> str:
    """Where an exception was raised; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
