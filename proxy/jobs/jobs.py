"""All parts of the package, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from prometheus_client import Metric

from proxy.access_log import Emit
from proxy.auth.api_keys import ApiKeys
from proxy.body.bodies import Bodies
from proxy.jobs.access import Access
from proxy.jobs.batches_endpoint import BatchesEndpoint
from proxy.jobs.database import Database
from proxy.jobs.files_endpoint import FilesEndpoint
from proxy.jobs.line_runner import Requests, Tools
from proxy.jobs.places import Places, places_of
from proxy.jobs.reporter import JobReporter
from proxy.jobs.runner import Runner
from proxy.jobs.settings import JobSettings
from proxy.models import ModelLoader
from proxy.router.in_flight import ServerState
from proxy.routes import Routes

_FILE_NAME: Final = "jobs.sqlite"


@dataclass(frozen=True, slots=True)
class JobStorage:
    """Where jobs are kept, a private directory, and their limits; `now` is Unix time."""

    directory: Path
    settings: JobSettings = field(default_factory=JobSettings)
    now: Callable[[], int] = lambda: int(datetime.now(tz=UTC).timestamp())


class Jobs:
    """Files and batches: their endpoints, and the task that computes them."""

    def __init__(
        self,
        storage: JobStorage,
        requests: Requests,
        loader: ModelLoader,
        keys: ApiKeys,
        bodies: Bodies,
        emit: Emit,
    ) -> None:
        self._loader = loader
        self._bodies = bodies
        self._reporter = JobReporter(emit)
        self._database = Database(
            storage.directory / _FILE_NAME, storage.settings.total_bytes, self._reporter.paused
        )
        self._tools = Tools(
            database=self._database,
            requests=requests,
            access=Access(keys, loader),
            settings=storage.settings,
            reporter=self._reporter,
            now=storage.now,
        )
        self._runner = Runner(Places(self._places_of), self._tools, bodies.settings)

    def add_routes(self, routes: Routes, server_state: ServerState) -> None:
        timeout_s = self._bodies.settings.body_timeout_s
        FilesEndpoint(self._tools, self._runner, server_state, timeout_s).add_routes(routes)
        BatchesEndpoint(self._tools, self._runner, self._bodies).add_routes(routes)

    async def serve(self) -> None:
        """Compute batches until cancelled; lines in flight then go back to their batches."""
        await self._runner.serve()

    def close(self) -> None:
        self._database.close()

    def collect(self) -> Iterator[Metric]:
        return self._reporter.collect()

    def _places_of(self, model: str) -> int:
        # Not by `names`: their slots are those of when the names last changed.
        slots = next((one.slots for one in self._loader.models() if one.id == model), 0)
        return places_of(slots, self._tools.settings)
