"""The daemon's task that records requests: in batches, in a thread, and never in their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from supervisor.errors import AccessDenied
from supervisor.events import Event, EventStream, Listener
from supervisor.request_record.files import RecordFiles
from supervisor.request_record.observer import Observer
from supervisor.request_record.recorded_request import RecordedRequest

# What is not written yet is lost when the daemon is killed.
_BATCH_S: Final = 2.0
_BATCH_MAX: Final = 512

Batch = Mapping[str, Sequence[RecordedRequest]]


class RequestRecorder:
    """Records the requests of models for which `is_recorded` is true."""

    def __init__(
        self, files: RecordFiles, events: EventStream, is_recorded: Callable[[str], bool]
    ) -> None:
        self._files = files
        self._events = events
        self._is_recorded = is_recorded
        self._observer = Observer()
        self._has_failed = False

    async def serve(self) -> None:
        """Record until cancelled; what was observed by then is written."""
        with self._events.listen() as listener:
            while True:
                batch: dict[str, list[RecordedRequest]] = {}
                try:
                    await self._collect(listener, batch)
                except asyncio.CancelledError:
                    self._write(batch)
                    raise
                failure = await asyncio.to_thread(self._write, batch)
                self._report(failure)

    async def _collect(self, listener: Listener, batch: dict[str, list[RecordedRequest]]) -> None:
        """Wait for a request to record, then for more of them."""
        while not batch:
            self._add(await listener.next(), batch)
        with suppress(TimeoutError):
            async with asyncio.timeout(_BATCH_S):
                for _ in range(_BATCH_MAX):
                    self._add(await listener.next(), batch)

    def _add(self, event: Event, batch: dict[str, list[RecordedRequest]]) -> None:
        if event.name != "request.finished":
            return
        model = str(event.fields["model"])
        if self._is_recorded(model) and (request := self._observer.observe(event.at, event.fields)):
            batch.setdefault(model, []).append(request)

    def _write(self, batch: Batch) -> str | None:
        """Write a batch; return why it was lost, or None."""
        try:
            for model, requests in batch.items():
                self._files.append(model, requests)
        except (OSError, AccessDenied) as error:
            return str(error)
        return None

    def _report(self, failure: str | None) -> None:
        """Warn of the first failure in a row."""
        if failure and not self._has_failed:
            self._events.emit("requests.record_failed", reason=failure)
        self._has_failed = failure is not None
