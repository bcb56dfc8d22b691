"""One batch from its validation to its end.

Everything that must outlast the process is in the database, and a job that is created again goes on
from there: a line without a result is computed, whether it was begun before or not.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from proxy.errors import ProxyError
from proxy.jobs import batch_rows, file_rows, result_line, result_rows
from proxy.jobs.line_runner import KeyGone, Tools, run_line, store
from proxy.jobs.places import Place, Places
from proxy.jobs.records import Batch, End, StoredLine
from proxy.jobs.request_line import RequestLine, is_blank, read_valid_line
from proxy.jobs.validation import Validation
from proxy.settings import ProxySettings

# Lines that get their results in one transaction when a batch expires.
_EXPIRED_AT_ONCE: Final = 500


class Job:
    """A batch that has not ended; `run` it once."""

    def __init__(self, batch: Batch, places: Places, tools: Tools, settings: ProxySettings) -> None:
        self._batch = batch
        self._places = places
        self._tools = tools
        self._settings = settings
        self._order = asyncio.Lock()  # of its lines, where one waits for a place
        self._timeout: asyncio.Timeout | None = None
        self._is_cancelled = batch.status == "cancelling"

    async def run(self) -> None:
        """Return when the batch has ended; cancelled, it goes on in another job."""
        self._note(self._batch)
        left_s = max(0, self._batch.expires_at - self._tools.now())
        self._timeout = timeout = asyncio.timeout(0 if self._is_cancelled else left_s)
        try:
            async with timeout:
                await self._work()
        except TimeoutError:
            if not timeout.expired():
                raise
        if self._batch.is_active:
            await self._end()

    def cancel(self) -> None:
        """End it without the lines that have no result."""
        self._is_cancelled = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def _note(self, batch: Batch) -> None:
        self._batch = batch
        self._tools.reporter.changed(batch)

    # Lines.

    async def _work(self) -> None:
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status == "in_progress":
            try:
                await self._compute()
            except* KeyGone:
                self._is_cancelled = True

    async def _validate(self) -> None:
        names = self._tools.access.names(self._batch.owner)
        if names is None:
            self._is_cancelled = True
            return
        validation = Validation(self._batch.endpoint, self._settings, names.resolve)
        at: int | None = 0
        while at is not None and not validation.is_full:
            at = await self._validate_some(validation, at)
        errors, total, now = validation.errors(), validation.total, self._tools.now()
        batch_id = self._batch.id
        self._note(
            await self._tools.database.write_until_done(
                lambda connection: (
                    batch_rows.fail(connection, batch_id, errors, now)
                    if errors
                    else batch_rows.begin(connection, batch_id, total, now)
                )
            )
        )

    async def _validate_some(self, validation: Validation, after: int) -> int | None:
        """Validate the lines behind a number; return that of the last, or None at the end."""
        lines = await self._tools.database.read_until_done(
            lambda connection: file_rows.lines_of(connection, self._batch.input_file, after)
        )
        await asyncio.to_thread(validation.add_all, lines)
        return lines[-1].number if lines else None

    async def _compute(self) -> None:
        after = 0
        async with asyncio.TaskGroup() as group:
            while found := await self._pending(after, 1):
                (line,) = found
                after = line.number
                if not is_blank(line.data):
                    await self._begin(line, group)

    async def _begin(self, line: StoredLine, group: asyncio.TaskGroup) -> None:
        """Compute a line as soon as its model has a place for it."""
        request = read_valid_line(line.data)
        place = Place(self._model(request), self._batch.owner, len(line.data))
        async with self._order:
            await self._places.take(place)
        pause = functools.partial(self._pause, place)
        task = group.create_task(run_line(self._batch, line, request, self._tools, pause))
        # Also where the task is cancelled before its first step.
        task.add_done_callback(lambda _: self._places.release(place))

    async def _pause(self, place: Place, wait_s: float) -> None:
        """Wait with a line for the limits of its key; no line behind it begins before."""
        self._places.release(place)
        async with self._order:
            await self._tools.sleep(wait_s)
            await self._places.take(place)

    def _model(self, request: RequestLine) -> str:
        """The model that a line means; empty where its owner may not use it."""
        names = self._tools.access.names(self._batch.owner)
        if names is None:
            raise KeyGone
        try:
            return names.resolve(request.model).model_info.id
        except ProxyError:
            return ""

    async def _pending(self, after: int, most: int) -> list[StoredLine]:
        return await self._tools.database.read_until_done(
            lambda connection: result_rows.pending(connection, self._batch, after, most)
        )

    # The end.

    async def _end(self) -> None:
        database, batch_id, now = self._tools.database, self._batch.id, self._tools.now()
        change = batch_rows.cancel if self._is_cancelled else batch_rows.finalize
        self._note(await database.write_until_done(lambda one: change(one, batch_id, now)))
        status: End = "cancelled" if self._batch.status == "cancelling" else "expired"
        if self._batch.status == "finalizing":
            status = await self._complete()
        ttl_s = self._tools.settings.keep_files_s
        self._note(
            await database.write_until_done(
                lambda one: result_rows.end(one, self._batch, status, self._tools.now(), ttl_s)
            )
        )

    async def _complete(self) -> End:
        """Give lines without a result one: the window is over."""
        after = 0
        while lines := await self._pending(after, _EXPIRED_AT_ONCE):
            after = lines[-1].number
            results = [
                result_line.expired(line.number, read_valid_line(line.data).custom_id)
                for line in lines
                if not is_blank(line.data)
            ]
            await store(self._batch, results, self._tools)
        has_expired = await self._tools.database.read_until_done(
            lambda connection: result_rows.has_expired_lines(connection, self._batch.key)
        )
        return "expired" if has_expired else "completed"
