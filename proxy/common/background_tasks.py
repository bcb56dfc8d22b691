"""Background tasks of the daemon: retried, with failures counted and reported.

`persist` is the only place that catches every exception of such a task. It reports a failure once a
minute with a traceback. Counts and listener belong to the process, as in `logging`. `Throttle`
limits events per cause and minute, so that no client can fill the log. `worker_threads` starts
threads that do not receive signals that end the process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

WINDOW_S: Final = 60.0
# Above this, causes share one window.
_CAUSES_MAX: Final = 64
_OTHERS: Final = "others"


class Throttle:
    """Admits `burst` events per cause and window.

    `rest` is called at the end of a window with the number of events that were not admitted.
    """

    def __init__(
        self,
        burst: int,
        rest: Callable[[Hashable, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._rest = rest
        self._clock = clock
        self._windows: dict[Hashable, tuple[float, int]] = {}

    def admit(self, cause: Hashable) -> bool:
        self.expire()
        if cause not in self._windows and len(self._windows) >= _CAUSES_MAX:
            cause = _OTHERS
        if cause not in self._windows:
            self._windows[cause] = (self._clock() + WINDOW_S, 0)
            _call_later(WINDOW_S, self.expire)
        until_s, count = self._windows[cause]
        self._windows[cause] = (until_s, count + 1)
        return count < self._burst

    def expire(self) -> None:
        now_s = self._clock()
        for cause in [cause for cause, (until_s, _) in self._windows.items() if until_s <= now_s]:
            _, count = self._windows.pop(cause)
            if count > self._burst:
                self._rest(cause, count - self._burst)


def _call_later(delay_s: float, call: Callable[[], None]) -> None:
    # Without an event loop, the next event ends the window.
    try:
        asyncio.get_running_loop().call_later(delay_s, call)
    except RuntimeError:
        return


def worker_threads(count: int | None, name: str) -> ThreadPoolExecutor:
    """Make a pool whose threads leave signals to the main thread.

    While a daemon exits, the main thread blocks signals to replace their handlers; in any other
    thread the default action, which kills the process, could still take effect.
    """
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_block_signals)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


_LAST_PAUSE_S: Final = 5.0
# After this time without a failure, the backoff starts again.
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

        `more` counts failures of the same cause that were not reported in the minute before. A new
        listener hears of each cause again.
        """
        self._emit = emit
        self._throttle = Throttle(1, self._rest)

    def begin(self, task: str) -> None:
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


async def persist(
    task: str, work: Callable[[], Awaitable[_Result]], *, first_pause_s: float = 0.1
) -> _Result:
    """Run work until it returns; restart it `first_pause_s` to 5 s after an exception.

    `task` is its name in the log and in `/metrics`: a constant of few words.
    """
    clock, pause_s = asyncio.get_running_loop().time, first_pause_s
    FAILURES.begin(task)
    while True:
        began_at_s = clock()
        try:
            return await work()
        except Exception as error:
            FAILURES.note(task, error)
            # A TaskGroup raises the errors of its tasks rather than CancelledError.
            if (running := asyncio.current_task()) and running.cancelling():
                raise asyncio.CancelledError from error
        if clock() - began_at_s > _LONG_S:
            pause_s = first_pause_s
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _place(error: BaseException) -> str:
    """Return the file and line that raised an exception; for a group, its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
