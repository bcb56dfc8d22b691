"""`/v1/batches`: create, show, list and cancel batches."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from proxy.auth.api_keys import KEY
from proxy.body.bodies import Bodies
from proxy.body.read import check_complexity, members_of, read_body
from proxy.errors import NotFound, quoted
from proxy.jobs import batch_rows
from proxy.jobs.access import owner_of
from proxy.jobs.batch_request import new_batch
from proxy.jobs.line_runner import Tools
from proxy.jobs.objects import batch_object, page_object
from proxy.jobs.queries import limit_of
from proxy.jobs.records import Batch
from proxy.jobs.runner import Runner
from proxy.json_response import json_response
from proxy.request import client_of
from proxy.routes import PATH_ID, Routes

_LIST_DEFAULT: Final = 20  # both as OpenAI's
_LIST_MAX: Final = 100


class BatchesEndpoint:
    """A client sees the batches of its own API key only."""

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
            body = await read_body(request, share)
            await check_complexity(body, share)
            new = new_batch(members_of(body), owner_of(request[KEY]))
        now, most = self._tools.now(), self._tools.settings.max_jobs
        batch = await self._tools.database.write(
            lambda connection: batch_rows.create(connection, new, now, most)
        )
        self._runner.wake()
        return self._shown(batch)

    async def show(self, request: web.BaseRequest) -> web.Response:
        owner, batch_id = owner_of(request[KEY]), request[PATH_ID]
        found = await self._tools.database.read(lambda one: batch_rows.find(one, owner, batch_id))
        if found is None:
            raise _missing(batch_id)
        return self._shown(found)

    async def list(self, request: web.BaseRequest) -> web.Response:
        limit = limit_of(request.query, _LIST_DEFAULT, _LIST_MAX)
        owner, after = owner_of(request[KEY]), request.query.get("after")
        found = await self._tools.database.read(
            lambda connection: batch_rows.page(connection, owner, after, limit)
        )
        return json_response(page_object(found, [self._object(one) for one in found[:limit]]))

    async def cancel(self, request: web.BaseRequest) -> web.Response:
        owner, batch_id, now = owner_of(request[KEY]), request[PATH_ID], self._tools.now()
        batch = await self._tools.database.write(
            lambda one: (
                batch_rows.find(one, owner, batch_id) and batch_rows.cancel(one, batch_id, now)
            )
        )
        if batch is None:
            raise _missing(batch_id)
        self._runner.cancel(batch_id)
        return self._shown(batch)

    def _shown(self, batch: Batch) -> web.Response:
        return json_response(self._object(batch))

    def _object(self, batch: Batch) -> dict[str, object]:
        wait_reason = self._tools.reporter.wait_reason(batch)
        return batch_object(batch, self._tools.database.failure or wait_reason)


def _missing(batch_id: str) -> NotFound:
    return NotFound(f"there is no batch {quoted(batch_id)}; GET /v1/batches lists them")
