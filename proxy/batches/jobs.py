"""`/v1/batches` (create, show, list and cancel batches), and `Jobs`, which builds all parts.

Source: OpenAI's API reference, create batch; the limits of metadata too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web
from prometheus_client import Metric

from proxy.auth.api_keys import KEY
from proxy.batches import rows
from proxy.batches.database import Database
from proxy.batches.files_api import FilesEndpoint, check_ttl_s
from proxy.batches.line_runner import Access, JobReporter, Tools, owner_of
from proxy.batches.own_requests import OwnRequests
from proxy.batches.records import COMPLETION_WINDOW, Batch, batch_object, limit_of, page_object
from proxy.batches.runner import Places, Runner, places_of
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest
from proxy.http.body import Bodies, read_members
from proxy.http.middleware import PATH_ID, Routes, json_response
from proxy.request.request import client_of
from proxy.settings import JobSettings

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_METADATA_MAX: Final = 16
_METADATA_NAME_MAX: Final = 64
_METADATA_VALUE_MAX: Final = 512


# Of a batch to create: the endpoint, the id of its file, its metadata as JSON, and the seconds for
# which its results are kept.
_NewBatch = tuple[str, str, str | None, int | None]


def new_batch(members: Mapping[str, Any]) -> _NewBatch:
    """Parse the request for a batch; raise BadRequest if it is invalid."""
    file_id, endpoint = members.get("input_file_id"), members.get("endpoint")
    if not isinstance(file_id, str):
        raise BadRequest("the member input_file_id must be the id of a file")
    if endpoint not in ENDPOINTS:
        raise BadRequest(f"the member endpoint must be one of {', '.join(ENDPOINTS)}")
    if members.get("completion_window") != COMPLETION_WINDOW:
        raise BadRequest(f'the member completion_window must be "{COMPLETION_WINDOW}"')
    ttl_s = None
    if (policy := members.get("output_expires_after")) is not None:
        policy = policy if isinstance(policy, dict) else {}
        ttl_s = check_ttl_s(policy.get("anchor"), policy.get("seconds"))
    metadata = members.get("metadata")
    if metadata is not None and not _is_metadata(metadata):
        raise BadRequest(
            f"metadata may have {_METADATA_MAX} members, each a string of up to "
            f"{_METADATA_VALUE_MAX} characters with a name of up to {_METADATA_NAME_MAX}"
        )
    shown = None if metadata is None else orjson.dumps(metadata).decode()
    return endpoint, file_id, shown, ttl_s


def _is_metadata(given: object) -> bool:
    return (
        isinstance(given, dict)
        and len(given) <= _METADATA_MAX
        and all(
            isinstance(value, str)
            and len(value) <= _METADATA_VALUE_MAX
            and len(name) <= _METADATA_NAME_MAX
            for name, value in given.items()
        )
    )


_LIST_DEFAULT: Final = 20  # both as OpenAI's
_LIST_MAX: Final = 100


class BatchesEndpoint:
    """Endpoints of batches; a client sees only the batches of its own API key."""

    def __init__(self, tools: Tools, runner: Runner, bodies: Bodies) -> None:
        self._tools = tools
        self._runner = runner
        self._bodies = bodies

    def add_routes(self, routes: Routes) -> None:
        routes.add("/v1/batches", get=self.list, post=self.create)
        routes.add("/v1/batches/{id}/cancel", post=self.cancel)
        routes.add("/v1/batches/{id}", get=self.show)

    async def create(self, request: web.BaseRequest) -> web.Response:
        with self._bodies.share(client_of(request)) as share:
            new = new_batch(await read_members(request, share))
        owner, now, most = owner_of(request[KEY]), self._tools.now(), self._tools.settings.max_jobs
        batch = await self._tools.database.run(
            rows.create_batch, owner, *new, now=now, max_jobs=most
        )
        self._runner.wake()
        return json_response(self._object(batch))

    async def show(self, request: web.BaseRequest) -> web.Response:
        owner, batch_id = owner_of(request[KEY]), request[PATH_ID]
        batch = await self._tools.database.run(rows.find_batch, owner, batch_id)
        return json_response(self._object(batch))

    async def list(self, request: web.BaseRequest) -> web.Response:
        limit = limit_of(request.query, _LIST_DEFAULT, _LIST_MAX)
        owner, after = owner_of(request[KEY]), request.query.get("after")
        found = await self._tools.database.run(rows.page_of_batches, owner, after, limit)
        return json_response(page_object(found, [self._object(batch) for batch in found[:limit]]))

    async def cancel(self, request: web.BaseRequest) -> web.Response:
        owner, batch_id, now = owner_of(request[KEY]), request[PATH_ID], self._tools.now()
        batch = await self._tools.database.run(rows.cancel_batch, owner, batch_id, now)
        self._runner.cancel(batch_id)
        return json_response(self._object(batch))

    def _object(self, batch: Batch) -> dict[str, object]:
        wait_reason = self._tools.reporter.wait_reason(batch)
        return batch_object(batch, self._tools.database.failure or wait_reason)


_FILE_NAME: Final = "jobs.sqlite"


class Jobs(Feature):
    """Files and batches: the endpoints, and the task that computes batches.

    `directory` is private.
    """

    def __init__(
        self, core: Core, requests: OwnRequests, directory: Path, settings: JobSettings
    ) -> None:
        self._core = core
        self._reporter = JobReporter(core.metrics.emit)
        self._database = Database(
            directory / _FILE_NAME, settings.total_bytes, self._reporter.note_pause
        )
        self._tools = Tools(
            database=self._database,
            requests=requests,
            access=Access(core.keys, core.loader),
            settings=settings,
            reporter=self._reporter,
        )
        self._runner = Runner(Places(self._places_of), self._tools, core.settings)

    def add_routes(self, routes: Routes) -> None:
        server_state, timeout_s = self._core.server_state, self._core.settings.body_timeout_s
        FilesEndpoint(self._tools, self._runner, server_state, timeout_s).add_routes(routes)
        BatchesEndpoint(self._tools, self._runner, self._core.bodies).add_routes(routes)

    async def run(self) -> None:
        """Compute batches until cancelled; lines in flight then return to their batches."""
        await self._runner.serve()

    def close(self) -> None:
        self._database.close()

    def metrics(self) -> Iterator[Metric]:
        return self._reporter.collect()

    def _places_of(self, model: str) -> int:
        # Not from `names`, whose slots date from the last change of the names.
        slots = next((info.slots for info in self._core.loader.models() if info.id == model), 0)
        return places_of(slots, self._tools.settings)
