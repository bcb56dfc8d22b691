"""Runs all batches that have not ended, and removes files that do not exist any more."""

from __future__ import annotations

import asyncio
from typing import Final

from proxy.jobs import batch_rows, file_rows
from proxy.jobs.job import Job
from proxy.jobs.line_runner import Tools
from proxy.jobs.places import Places
from proxy.jobs.records import Batch
from proxy.settings import ProxySettings

_SWEEP_EVERY_S: Final = 3600.0


class Runner:
    """Nothing is read before there is a database: `wake` it when there is more to do.

    Attributes:
        uploading: The ids of files that are being written.
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
        """A batch was created."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """A batch is being cancelled."""
        if job := self._jobs.get(batch_id):
            job.cancel()
        else:
            self._wake.set()

    def sweep_soon(self) -> None:
        """A file was deleted, or its upload given up."""
        self._sweep_soon.set()

    async def serve(self) -> None:
        """Run until cancelled; lines in flight then go back to their batches."""
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
        for batch in await self._tools.database.read_until_done(batch_rows.active):
            if batch.id not in self._jobs:
                self._jobs[batch.id] = Job(batch, self._places, self._tools, self._settings)
                group.create_task(self._run(batch))

    async def _run(self, batch: Batch) -> None:
        await self._jobs[batch.id].run()
        del self._jobs[batch.id]

    async def _sweep(self) -> None:
        """Remove what does not exist any more, at once, when told, and every hour."""
        while True:
            if self._tools.database.exists:
                await self._sweep_all()
            try:
                async with asyncio.timeout(_SWEEP_EVERY_S):
                    await self._sweep_soon.wait()
            except TimeoutError:
                continue
            finally:
                self._sweep_soon.clear()

    async def _sweep_all(self) -> None:
        database, now = self._tools.database, self._tools.now()
        await database.write_until_done(lambda connection: file_rows.expire(connection, now))
        is_left = True
        while is_left:
            is_left = await database.write_until_done(
                lambda connection: file_rows.sweep(connection, frozenset(self.uploading))
            )
