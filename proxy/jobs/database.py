"""The SQLite database of jobs: one connection in a thread of its own, one transaction a call."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from proxy.errors import Draining, StorageFailed, StorageFull
from proxy.jobs import storage_errors
from proxy.jobs.connection import in_transaction, open_connection
from proxy.threads import worker_threads

# Between two attempts while the disk is full.
_RETRY_FIRST_S: Final = 1.0
_RETRY_MAX_S: Final = 15.0

Result = TypeVar("Result")


class Database:
    """The database; opened, and created, by its first call.

    Args:
        max_bytes: Its largest size.
        on_failure: Called with the reason when it can no longer be written, and with None when it
            can be again.

    Attributes:
        failure: Why it cannot be written, or None.
    """

    def __init__(
        self, path: Path, max_bytes: int, on_failure: Callable[[str | None], None]
    ) -> None:
        self.path = path
        self.failure: str | None = None
        self._max_bytes = max_bytes
        self._on_failure = on_failure
        self._thread = worker_threads(1, "jobs")
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False

    @property
    def exists(self) -> bool:
        return self.path.exists()

    async def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `work` in a transaction.

        Raises:
            StorageFull: There is no space left; nothing was written.
            StorageFailed: The database cannot be used; nothing was written.
        """
        if self._is_closed:
            raise Draining("the server is stopping; retry later")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: self._transaction(work))

    async def write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """As `read`; notes whether the database could be written."""
        try:
            result, is_changed = await self.read(lambda one: _noting_changes(one, work))
        except (StorageFull, StorageFailed) as error:
            self._note(error.message)
            raise
        if is_changed:
            self._note(None)
        return result

    async def read_until_done(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """As `read`, again and again until the database can be used."""
        return await _until_done(lambda: self.read(work))

    async def write_until_done(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """As `write`, again and again until the database can be written."""
        return await _until_done(lambda: self.write(work))

    def close(self) -> None:
        """Close it behind the calls that were begun; further ones raise Draining."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._close)
            self._thread.shutdown(wait=False)

    def _note(self, failure: str | None) -> None:
        if (failure is None) != (self.failure is None):
            self._on_failure(failure)
        self.failure = failure

    # In the thread.

    def _transaction(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            connection = self._opened()
            return in_transaction(connection, work)
        except sqlite3.Error as error:
            is_disk_full = storage_errors.has_full_disk(self.path.parent)
            failure = storage_errors.of_sqlite(error, is_disk_full=is_disk_full)
            if failure is None:
                raise
            if isinstance(failure, StorageFailed):
                self._close()  # the next call opens it again
            raise failure from error
        except OSError as error:
            raise storage_errors.of_system(error) from error

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = open_connection(self.path, self._max_bytes)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _noting_changes(
    connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], Result]
) -> tuple[Result, bool]:
    """The result of `work`, and whether it wrote anything."""
    before = connection.total_changes
    result = work(connection)
    return result, connection.total_changes != before


async def _until_done(call: Callable[[], Awaitable[Result]]) -> Result:
    pause_s = _RETRY_FIRST_S
    while True:
        try:
            return await call()
        except (StorageFull, StorageFailed):
            await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _RETRY_MAX_S)
