"""`/v1/files`: upload, list, show, read and delete files of batches."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from proxy.auth.api_keys import KEY
from proxy.errors import NotFound, ProxyError, TooManyRequests, quoted
from proxy.headers import RESPONSE_HEADERS
from proxy.jobs import file_rows
from proxy.jobs.access import owner_of
from proxy.jobs.line_runner import Tools
from proxy.jobs.objects import file_object, page_object
from proxy.jobs.queries import limit_of, order_of
from proxy.jobs.records import StoredFile
from proxy.jobs.runner import Runner
from proxy.jobs.upload import Upload
from proxy.jobs.upload_form import read_upload
from proxy.json_response import json_response
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.routes import PATH_ID, Routes

_LIST_MAX: Final = 10_000  # as OpenAI's
_UPLOADS_MAX: Final = 4
_RETRY_AFTER_S: Final = 10


class FilesEndpoint:
    """A client sees the files of its own API key only."""

    def __init__(
        self, tools: Tools, runner: Runner, server_state: ServerState, body_timeout_s: float
    ) -> None:
        self._tools = tools
        self._runner = runner
        self._server_state = server_state
        self._body_timeout_s = body_timeout_s
        self._uploads = 0

    def add_routes(self, routes: Routes) -> None:
        routes.add("/v1/files", get=self.list, post=self.create)
        routes.add("/v1/files/{id}/content", get=self.content)
        routes.add("/v1/files/{id}", get=self.show, delete=self.delete)

    async def create(self, request: web.BaseRequest) -> web.Response:
        if self._uploads >= _UPLOADS_MAX:
            raise TooManyRequests(
                f"{_UPLOADS_MAX} files are being uploaded; retry later", _RETRY_AFTER_S
            )
        self._uploads += 1
        try:
            with InFlightRequest(self._server_state.in_flight):
                return json_response(file_object(await self._create(request)))
        finally:
            self._uploads -= 1

    async def _create(self, request: web.BaseRequest) -> StoredFile:
        upload = Upload(owner_of(request[KEY]), self._tools)
        self._runner.uploading.add(upload.id)
        try:
            ttl_s = await read_upload(request, upload, self._body_timeout_s)
            return await upload.finish(ttl_s)
        finally:
            # What was not finished is removed.
            self._runner.uploading.discard(upload.id)
            self._runner.sweep_soon()

    async def list(self, request: web.BaseRequest) -> web.Response:
        limit, order = limit_of(request.query, _LIST_MAX, _LIST_MAX), order_of(request.query)
        found = await self._tools.database.read(
            lambda connection: file_rows.page(
                connection,
                owner_of(request[KEY]),
                purpose=request.query.get("purpose"),
                after=request.query.get("after"),
                limit=limit,
                order=order,
            )
        )
        return json_response(page_object(found, [file_object(one) for one in found[:limit]]))

    async def show(self, request: web.BaseRequest) -> web.Response:
        return json_response(file_object(await self._find(request)))

    async def delete(self, request: web.BaseRequest) -> web.Response:
        owner, file_id = owner_of(request[KEY]), request[PATH_ID]
        deleted = await self._tools.database.write(
            lambda connection: file_rows.delete(connection, owner, file_id)
        )
        if deleted is None:
            raise _missing(file_id)
        self._runner.sweep_soon()
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: web.BaseRequest) -> web.StreamResponse:
        file = await self._find(request)
        response = web.StreamResponse(headers=request[RESPONSE_HEADERS])
        response.content_type = "application/jsonl"
        response.content_length = file.size_bytes
        await response.prepare(request)
        if request.method != "HEAD":
            await self._send(file, response, request)
        return response

    async def _send(
        self, file: StoredFile, response: web.StreamResponse, request: web.BaseRequest
    ) -> None:
        """Send the lines; the connection is aborted if the file is deleted meanwhile."""
        after = sent_bytes = 0
        try:
            while lines := await self._tools.database.read(
                lambda one: file_rows.content(one, file, after)  # noqa: B023 (called at once)
            ):
                after = lines[-1].number
                piece = b"".join(line.data for line in lines)
                sent_bytes += len(piece)
                await response.write(piece)
        except (ProxyError, ConnectionError):
            sent_bytes = -1
        if sent_bytes != file.size_bytes and request.transport is not None:
            request.transport.abort()

    async def _find(self, request: web.BaseRequest) -> StoredFile:
        owner, file_id = owner_of(request[KEY]), request[PATH_ID]
        found = await self._tools.database.read(lambda one: file_rows.find(one, owner, file_id))
        if found is None:
            raise _missing(file_id)
        return found


def _missing(file_id: str) -> NotFound:
    return NotFound(f"there is no file {quoted(file_id)}; GET /v1/files lists them")
