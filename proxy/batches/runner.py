"""Runs each batch from its validation to its end, and removes deleted files.

All state that must outlast the process is in the database. A job that is created again continues
from there: each line without a result is computed, whether or not it was begun before.

Each model computes as many lines at once as it has slots, so that few lines wait in its queue.
There they have batch priority: the router serves other requests first. A line waits until its model
has a place. Each owner of batches has a queue for each model, and the owner with the fewest places
comes first. Each batch waits with one line at a time, so batches take turns. The memory of the
lines that are computed at once is bounded.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from proxy.batches import rows
from proxy.batches.line_runner import KeyGone, Tools, run_line, store
from proxy.batches.lines import RequestLine, Validation, is_blank, read_valid_line, result_of
from proxy.batches.records import Batch, End, Status, StoredLine
from proxy.errors import ProxyError
from proxy.settings import JobSettings, ProxySettings


def places_of(slots: int, settings: JobSettings) -> int:
    """Return how many lines a model computes at once; `slots` is 0 if not yet known."""
    return max(1, min(slots, settings.max_in_flight))


@dataclass(slots=True, eq=False)
class Place:
    """The right to compute one line, from `Places.take` until `Places.release`."""

    model: str
    owner: str
    size_bytes: int
    granted: asyncio.Event = field(default_factory=asyncio.Event)


class Places:
    """The places of all models; `limit_of` returns a model's current number of places."""

    def __init__(self, limit_of: Callable[[str], int]) -> None:
        self._limit_of = limit_of
        self._taken: Counter[str] = Counter()
        self._taken_by: Counter[tuple[str, str]] = Counter()
        self._held_bytes = 0
        self._waiting: deque[Place] = deque()

    async def take(self, place: Place) -> None:
        """Wait for a place, which may be taken again after a release."""
        self._waiting.append(place)
        self._grant()
        try:
            await place.granted.wait()
        except asyncio.CancelledError:
            if not place.granted.is_set():
                self._waiting.remove(place)
            self.release(place)
            raise

    def release(self, place: Place) -> None:
        if place.granted.is_set():
            place.granted.clear()
            self._count(place, -1)
            self._grant()

    def _count(self, place: Place, change: int) -> None:
        self._taken[place.model] += change
        self._taken_by[place.model, place.owner] += change
        if not self._taken_by[place.model, place.owner]:
            del self._taken_by[place.model, place.owner]
        self._held_bytes += change * place.size_bytes

    def _grant(self) -> None:
        def places_of_owner(place: Place) -> int:
            return self._taken_by[place.model, place.owner]

        # Among equals, `min` takes the first in the queue.
        while place := min(
            filter(self._has_room, self._waiting), key=places_of_owner, default=None
        ):
            self._waiting.remove(place)
            self._count(place, 1)
            place.granted.set()

    def _has_room(self, place: Place) -> bool:
        is_small = self._held_bytes + place.size_bytes <= 64 * 1024**2
        is_alone = not self._held_bytes
        return (is_small or is_alone) and self._taken[place.model] < self._limit_of(place.model)


# Lines whose results are stored in one transaction when a batch expires.
_EXPIRED_AT_ONCE: Final = 500


class Job:
    """A batch that has not ended; `run` it once."""

    def __init__(self, batch: Batch, places: Places, tools: Tools, settings: ProxySettings) -> None:
        self._batch = batch
        self._places = places
        self._tools = tools
        self._settings = settings
        self._order = asyncio.Lock()  # keeps the order of its lines while a line waits for a place
        self._timeout: asyncio.Timeout | None = None
        self._is_cancelled = batch.status == "cancelling"

    async def run(self) -> None:
        """Return when the batch has ended; if cancelled, another job can continue it."""
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
        self._is_cancelled = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def _note(self, batch: Batch) -> None:
        self._batch = batch
        self._tools.reporter.note_status(batch)

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
        names = self._tools.names_of(self._batch.owner)
        if names is None:
            self._is_cancelled = True
            return
        validation = Validation(self._batch.endpoint, self._settings, names.resolve)
        after = 0
        while not validation.is_full:
            lines = await self._tools.database.run_until_done(
                rows.lines_of, self._batch.input_file, after
            )
            await asyncio.to_thread(validation.add_all, lines)
            if not lines:
                break
            after = lines[-1].number
        if errors := validation.errors():
            await self._set_status("failed", errors=errors)
        else:
            await self._set_status("in_progress", total=validation.total)

    async def _compute(self) -> None:
        after = 0
        async with asyncio.TaskGroup() as group:
            while found := await self._pending(after, 1):
                (line,) = found
                after = line.number
                if not is_blank(line.data):
                    await self._begin(line, group)

    async def _begin(self, line: StoredLine, group: asyncio.TaskGroup) -> None:
        request = read_valid_line(line.data)
        place = Place(self._model(request), self._batch.owner, len(line.data))
        async with self._order:
            await self._places.take(place)
        pause = functools.partial(self._pause, place)
        task = group.create_task(run_line(self._batch, line, request, self._tools, pause))
        # A callback, because the task may be cancelled before its first step.
        task.add_done_callback(lambda _: self._places.release(place))

    async def _pause(self, place: Place, wait_s: float) -> None:
        """Wait with a line for the limits of its key; no later line begins before it."""
        self._places.release(place)
        async with self._order:
            await self._tools.sleep(wait_s)
            await self._places.take(place)

    def _model(self, request: RequestLine) -> str:
        """Return the model of a line; empty if its owner may not use it."""
        names = self._tools.names_of(self._batch.owner)
        if names is None:
            raise KeyGone
        try:
            return names.resolve(request.model).model_info.id
        except ProxyError:
            return ""

    async def _pending(self, after: int, most: int) -> list[StoredLine]:
        return await self._tools.database.run_until_done(
            rows.pending_lines, self._batch, after, most
        )

    # The end.

    async def _end(self) -> None:
        await self._set_status("cancelling" if self._is_cancelled else "finalizing")
        status: End = "cancelled" if self._batch.status == "cancelling" else "expired"
        if self._batch.status == "finalizing":
            status = await self._complete()
        now, ttl_s = self._tools.now(), self._tools.settings.keep_files_s
        self._note(
            await self._tools.database.run_until_done(
                rows.end_batch, self._batch, status, now, ttl_s
            )
        )

    async def _set_status(self, status: Status, **more: object) -> None:
        batch_id, now = self._batch.id, self._tools.now()
        self._note(
            await self._tools.database.run_until_done(
                rows.set_status, batch_id, status, now, **more
            )
        )

    async def _complete(self) -> End:
        after = 0
        while lines := await self._pending(after, _EXPIRED_AT_ONCE):
            after = lines[-1].number
            results = [
                result_of(line.number, read_valid_line(line.data).custom_id, None)
                for line in lines
                if not is_blank(line.data)
            ]
            await store(self._batch, results, self._tools)
        has_expired = await self._tools.database.run_until_done(
            rows.has_expired_lines, self._batch.key
        )
        return "expired" if has_expired else "completed"


class Runner:
    """Runs all batches, if a database exists; `wake` it when there is more to do.

    `uploading` has the ids of files that are being written.
    """

    def __init__(self, places: Places, tools: Tools, settings: ProxySettings) -> None:
        self.uploading: set[str] = set()
        self._places = places
        self._tools = tools
        self._settings = settings
        self._jobs: dict[str, Job] = {}
        self._wake = asyncio.Event()
        self._sweep_soon = asyncio.Event()

    def wake(self) -> None:
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        if job := self._jobs.get(batch_id):
            job.cancel()
        else:
            self._wake.set()

    def sweep_soon(self) -> None:
        """Note that a file was deleted or its upload given up."""
        self._sweep_soon.set()

    async def serve(self) -> None:
        """Run until cancelled; lines in flight then return to their batches."""
        self._jobs.clear()
        self._wake.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep())
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._tools.database.exists:
                    await self._begin(group)

    async def _begin(self, group: asyncio.TaskGroup) -> None:
        for batch in await self._tools.database.run_until_done(rows.active_batches):
            if batch.id not in self._jobs:
                self._jobs[batch.id] = Job(batch, self._places, self._tools, self._settings)
                group.create_task(self._run(batch))

    async def _run(self, batch: Batch) -> None:
        await self._jobs[batch.id].run()
        del self._jobs[batch.id]

    async def _sweep(self) -> None:
        """Remove deleted files at the start, on `sweep_soon`, and every hour."""
        while True:
            if self._tools.database.exists:
                await self._sweep_all()
            try:
                async with asyncio.timeout(3600.0):
                    await self._sweep_soon.wait()
            except TimeoutError:
                continue
            finally:
                self._sweep_soon.clear()

    async def _sweep_all(self) -> None:
        database, now = self._tools.database, self._tools.now()
        await database.run_until_done(rows.expire_files, now)
        is_left = True
        while is_left:
            is_left = await database.run_until_done(rows.sweep_files, self.uploading)
