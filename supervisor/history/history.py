"""The daemon's history: takes events, writes them in batches in a thread, and reads it back."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, Protocol, TypeVar

from proxy.requests.history import HistoryQuery, StoredRequest
from supervisor.errors import HistoryUnavailable
from supervisor.events import Emit, Event
from supervisor.history import statements
from supervisor.history.columns import FINISHED, REJECTED, row_of
from supervisor.history.database import HistoryDatabase, HistoryFailedError

# What is not written yet is lost when the daemon is killed.
_BATCH_S: Final = 1.0
# Requests that wait to be written; the oldest are dropped above it.
_PENDING_MAX: Final = 8192
_RUN_BITS: Final = 48
_DAY_S: Final = 86_400

Result = TypeVar("Result")


class HistoryLimits(Protocol):
    """As `[history]` of the settings."""

    @property
    def enabled(self) -> bool: ...

    @property
    def max_bytes(self) -> int: ...

    @property
    def max_age_days(self) -> float: ...


class History:
    """Keeps the requests of the events that it is given; `limits` are those that apply now."""

    def __init__(
        self, database: HistoryDatabase, emit: Emit, limits: Callable[[], HistoryLimits]
    ) -> None:
        self._database = database
        self._emit = emit
        self._limits = limits
        self._run = secrets.randbits(_RUN_BITS)
        self._pending: deque[Event] = deque(maxlen=_PENDING_MAX)
        self._arrived = asyncio.Event()
        self._has_failed = False

    def observe(self, event: Event) -> None:
        """Take an event (a sink of `EventStream`); most are of no interest."""
        if event.name in {FINISHED, REJECTED} and self.is_on:
            self._pending.append(event)
            self._arrived.set()

    async def serve(self) -> None:
        """Write until cancelled; what was observed by then is written."""
        try:
            while True:
                await self._arrived.wait()
                await asyncio.sleep(_BATCH_S)
                self._arrived.clear()
                await self._flush()
        finally:
            self._write()
            self._database.close()

    @property
    def is_on(self) -> bool:
        return self._limits().enabled

    async def requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """Return stored requests, the latest first; those that just ended among them.

        Raises:
            HistoryUnavailable: It is off, or cannot be read.
        """
        if not self.is_on:
            raise HistoryUnavailable("no history is kept", hint="set enabled = true in [history]")
        return await self._read(
            lambda: self._database.run(lambda one: statements.select(one, query))
        )

    async def forget(self, model: str | None) -> int:
        """Delete the requests of a model, or all; return how many. Raises HistoryUnavailable."""
        return await self._read(lambda: self._database.forget(model))

    async def _flush(self) -> None:
        if not (events := self._taken()):
            return
        try:
            await asyncio.to_thread(self._add, events)
        except HistoryFailedError as error:
            self._report(str(error))
        else:
            self._report(None)

    def _write(self) -> None:
        """Write at once, as the daemon ends."""
        with suppress(HistoryFailedError):
            if events := self._taken():
                self._add(events)

    def _taken(self) -> list[Event]:
        events = list(self._pending)
        self._pending.clear()
        return events

    def _add(self, events: Sequence[Event]) -> None:
        rows = [row_of(event, self._run) for event in events]
        limits = self._limits()
        oldest_at = datetime.now(UTC).timestamp() - limits.max_age_days * _DAY_S

        def work(connection: sqlite3.Connection) -> None:
            statements.insert(connection, rows)
            statements.prune(connection, limits.max_bytes, oldest_at)

        self._database.run(work)

    async def _read(self, work: Callable[[], Result]) -> Result:
        await self._flush()
        try:
            return await asyncio.to_thread(work)
        except HistoryFailedError as error:
            raise HistoryUnavailable(f"the history cannot be used: {error}") from error
        finally:
            self._report_replaced()

    def _report(self, failure: str | None) -> None:
        """Warn of the first failure in a row."""
        self._report_replaced()
        if failure and not self._has_failed:
            self._emit("history.write_failed", reason=failure)
        self._has_failed = failure is not None

    def _report_replaced(self) -> None:
        found, self._database.set_aside = self._database.set_aside, None
        if found:
            self._emit("history.replaced", reason=found.reason, kept=str(found.kept))
