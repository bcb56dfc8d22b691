"""`/v1/files` and `/v1/batches`, and `Jobs`, which builds all parts.

A file is written to the database while it arrives: it is never whole in memory, and clients do not
see an unfinished one.

Source: OpenAI's API reference, create batch; the limits of metadata too. openai-python sends
`purpose` and `expires_after[…]` before the file, other clients also behind it. RFC 7578: forms.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import BodyPartReader, MultipartReader, web
from prometheus_client import Metric

from proxy.auth.api_keys import KEY
from proxy.batches import records, rows
from proxy.batches.database import Database
from proxy.batches.line_runner import JobReporter, Tools, owner_of
from proxy.batches.lines import LineSplitter
from proxy.batches.own_requests import OwnRequests
from proxy.batches.runner import Places, Runner, places_of
from proxy.common.headers import RESPONSE_HEADERS
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest, ProxyError, RequestTimeout, StorageFull, TooManyRequests
from proxy.http.body import read_members
from proxy.http.forms import MALFORMED, boundary_of, form_error, is_form, plain_filename
from proxy.http.middleware import PATH_ID, Routes, json_response
from proxy.observe.record import InFlightRequest
from proxy.request.request import client_of
from proxy.settings import JobSettings

# Bytes of lines that are written in one transaction.
_WRITE_BYTES: Final = 1024**2


class Upload:
    """A file that a client uploads; all methods raise StorageFull or StorageFailed."""

    def __init__(self, owner: str, tools: Tools) -> None:
        self._owner = owner
        self._tools = tools
        self.id = records.new_id("file-")
        self._splitter = LineSplitter(tools.settings)
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._written = 0
        self._key = 0

    async def begin(self, filename: str) -> None:
        new = (self.id, self._owner, filename, self._tools.now())
        self._key = await self._tools.database.run(rows.begin_file, new)

    async def feed(self, piece: bytes) -> None:
        """Add bytes of the file; raise BadRequest above a limit."""
        await self._keep(self._splitter.feed(piece))

    async def finish(self, ttl_s: int | None) -> records.StoredFile:
        """Make the file visible to clients; raise BadRequest if it is empty."""
        await self._keep(self._splitter.close())
        await self._write()
        size_bytes = self._splitter.size_bytes
        if not size_bytes:
            raise BadRequest("the file is empty")
        expires_at = self._tools.now() + (ttl_s or self._tools.settings.keep_files_s)
        return await self._tools.database.run(rows.finish_file, self._key, size_bytes, expires_at)

    async def _keep(self, lines: list[bytes]) -> None:
        self._lines += lines
        self._lines_bytes += sum(map(len, lines))
        if self._lines_bytes >= _WRITE_BYTES:
            await self._write()

    async def _write(self) -> None:
        lines, first = self._lines, self._written + 1
        self._lines, self._lines_bytes, self._written = [], 0, self._written + len(lines)
        used_bytes = await self._tools.database.run(rows.used_bytes)
        if used_bytes > self._tools.settings.total_bytes * 3 // 4:
            raise StorageFull(
                "files and results of batches take three quarters of their disk space; delete "
                "files, or raise total_bytes under [jobs]"
            )
        await self._tools.database.run(rows.add_lines, self._key, first, lines)


_PARTS_MAX: Final = 16
_FIELD_MAX_BYTES: Final = 1024
_CHUNK_BYTES: Final = 64 * 1024
_FIELDS: Final = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
_TTL_MIN_S: Final = 3600  # as OpenAI's
_TTL_MAX_S: Final = 2_592_000


async def read_upload(request: web.BaseRequest, upload: Upload, timeout_s: float) -> int | None:
    """Read a form and write its file; return the time to keep it, None for the setting.

    Raises:
        BadRequest: It is not this form, or exceeds a limit.
        RequestTimeout: It did not arrive in time.
        StorageFull: There is no space for the file.
        StorageFailed: The database cannot be used.
    """
    content_type = request.headers.get("Content-Type", "")
    if not is_form(content_type):
        raise BadRequest("send the file as multipart/form-data with the fields purpose and file")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise BadRequest("send the form without a Content-Encoding")
    boundary = boundary_of(content_type)
    headers = {"Content-Type": f'multipart/form-data; boundary="{boundary}"'}
    reader = MultipartReader(headers, request.content)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(reader, upload)
    except TimeoutError as error:
        raise RequestTimeout(
            f"the file did not arrive within {timeout_s:g} s; "
            "send it faster, or raise body_timeout_s under [proxy]"
        ) from error
    except MALFORMED as error:
        raise form_error(error) from error
    except (web.RequestPayloadError, ConnectionError) as error:
        raise BadRequest("the body ended before its form did") from error


async def _read(reader: MultipartReader, upload: Upload) -> int | None:
    fields: dict[str, str] = {}
    has_file = False
    for _ in range(_PARTS_MAX):
        part = await reader.next()
        if part is None:
            break
        if not isinstance(part, BodyPartReader):
            raise BadRequest("a part of the form is itself multipart")
        if part.name == "file" and not has_file:
            has_file = True
            await _read_file(part, upload)
        else:
            fields[_field_name(part)] = await _read_text(part)
    else:
        raise BadRequest(f"the form has more than {_PARTS_MAX} parts")
    if not has_file:
        raise BadRequest("the form has no file")
    if fields.get("purpose") != "batch":
        raise BadRequest('the purpose must be "batch"; no other is supported')
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    is_number = seconds is not None and re.fullmatch("[0-9]{1,9}", seconds)
    return check_ttl_s(anchor or "created_at", int(seconds) if seconds and is_number else None)


async def _read_file(part: BodyPartReader, upload: Upload) -> None:
    await upload.begin(plain_filename(part.filename or "batch.jsonl"))
    while not part.at_eof():
        await upload.feed(await part.read_chunk(_CHUNK_BYTES))


def _field_name(part: BodyPartReader) -> str:
    if part.name not in _FIELDS:
        raise BadRequest("the form may have the fields purpose, file and expires_after only")
    return part.name


async def _read_text(part: BodyPartReader) -> str:
    text = b""
    while not part.at_eof():
        text += await part.read_chunk(_CHUNK_BYTES)
        if len(text) > _FIELD_MAX_BYTES:
            raise BadRequest(f"the field {part.name} has more than {_FIELD_MAX_BYTES} bytes")
    return text.decode()


def check_ttl_s(anchor: object, seconds: object) -> int:
    """Check `expires_after` and return its seconds; raises BadRequest."""
    if anchor != "created_at" or not isinstance(seconds, int) or isinstance(seconds, bool):
        raise BadRequest("expires_after needs the anchor created_at and a number of seconds")
    if not _TTL_MIN_S <= seconds <= _TTL_MAX_S:
        raise BadRequest(f"expires_after must be {_TTL_MIN_S} to {_TTL_MAX_S} seconds")
    return seconds


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
    if members.get("completion_window") != records.COMPLETION_WINDOW:
        raise BadRequest(f'the member completion_window must be "{records.COMPLETION_WINDOW}"')
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


_FILES_MAX: Final = 10_000  # as OpenAI's
_UPLOADS_MAX: Final = 4
_RETRY_AFTER_S: Final = 10
_LIST_DEFAULT: Final = 20  # both as OpenAI's
_LIST_MAX: Final = 100


class Jobs(Feature):
    """Files and batches: the endpoints, and the task that computes batches.

    A client sees only the files and batches of its own API key. `directory` is private.
    """

    def __init__(
        self, core: Core, requests: OwnRequests, directory: Path, settings: JobSettings
    ) -> None:
        self._core = core
        self._reporter = JobReporter(core.metrics.emit)
        self._database = Database(
            directory / "jobs.sqlite", settings.total_bytes, self._reporter.note_pause
        )
        self._tools = Tools(
            database=self._database,
            requests=requests,
            keys=core.keys,
            loader=core.loader,
            settings=settings,
            reporter=self._reporter,
        )
        self._runner = Runner(Places(self._places_of), self._tools, core.settings)

    def add_routes(self, routes: Routes) -> None:
        routes.add("/v1/files", get=self.list_files, post=self.upload)
        routes.add("/v1/files/{id}/content", get=self.file_content)
        routes.add("/v1/files/{id}", get=self.show_file, delete=self.delete_file)
        routes.add("/v1/batches", get=self.list_batches, post=self.create_batch)
        routes.add("/v1/batches/{id}/cancel", post=self.cancel_batch)
        routes.add("/v1/batches/{id}", get=self.show_batch)

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

    # Files.

    async def upload(self, request: web.BaseRequest) -> web.Response:
        uploading = self._runner.uploading
        if len(uploading) >= _UPLOADS_MAX:
            raise TooManyRequests(
                f"{_UPLOADS_MAX} files are being uploaded; retry later", _RETRY_AFTER_S
            )
        upload = Upload(owner_of(request[KEY]), self._tools)
        uploading.add(upload.id)
        try:
            with InFlightRequest(self._core.server_state.in_flight):
                ttl_s = await read_upload(request, upload, self._core.settings.body_timeout_s)
                return json_response(records.file_object(await upload.finish(ttl_s)))
        finally:
            # An unfinished file is removed.
            uploading.discard(upload.id)
            self._runner.sweep_soon()

    async def list_files(self, request: web.BaseRequest) -> web.Response:
        limit, order = (
            records.limit_of(request.query, _FILES_MAX, _FILES_MAX),
            records.order_of(request.query),
        )
        found = await self._tools.database.run(
            rows.page_of_files,
            owner_of(request[KEY]),
            purpose=request.query.get("purpose"),
            after=request.query.get("after"),
            limit=limit,
            order=order,
        )
        return json_response(
            records.page_object(found, [records.file_object(file) for file in found[:limit]])
        )

    async def show_file(self, request: web.BaseRequest) -> web.Response:
        return json_response(records.file_object(await self._file_of(request)))

    async def delete_file(self, request: web.BaseRequest) -> web.Response:
        owner, file_id = owner_of(request[KEY]), request[PATH_ID]
        await self._tools.database.run(rows.delete_file, owner, file_id)
        self._runner.sweep_soon()
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def file_content(self, request: web.BaseRequest) -> web.StreamResponse:
        file = await self._file_of(request)
        response = web.StreamResponse(headers=request[RESPONSE_HEADERS])
        response.content_type = "application/jsonl"
        response.content_length = file.size_bytes
        await response.prepare(request)
        if request.method != "HEAD":
            await self._send_lines(file, response, request)
        return response

    async def _send_lines(
        self, file: records.StoredFile, response: web.StreamResponse, request: web.BaseRequest
    ) -> None:
        """Send the lines; abort the connection if the file is deleted meanwhile."""
        after = sent_bytes = 0
        try:
            while lines := await self._tools.database.run(rows.file_content, file, after):
                after = lines[-1].number
                piece = b"".join(line.data for line in lines)
                sent_bytes += len(piece)
                await response.write(piece)
        except (ProxyError, ConnectionError):
            sent_bytes = -1
        if sent_bytes != file.size_bytes and request.transport is not None:
            request.transport.abort()

    async def _file_of(self, request: web.BaseRequest) -> records.StoredFile:
        owner, file_id = owner_of(request[KEY]), request[PATH_ID]
        return await self._tools.database.run(rows.find_file, owner, file_id)

    # Batches.

    async def create_batch(self, request: web.BaseRequest) -> web.Response:
        with self._core.bodies.share(client_of(request)) as share:
            new = new_batch(await read_members(request, share))
        owner, now, most = owner_of(request[KEY]), self._tools.now(), self._tools.settings.max_jobs
        batch = await self._tools.database.run(
            rows.create_batch, owner, *new, now=now, max_jobs=most
        )
        self._runner.wake()
        return json_response(self._shown(batch))

    async def show_batch(self, request: web.BaseRequest) -> web.Response:
        owner, batch_id = owner_of(request[KEY]), request[PATH_ID]
        batch = await self._tools.database.run(rows.find_batch, owner, batch_id)
        return json_response(self._shown(batch))

    async def list_batches(self, request: web.BaseRequest) -> web.Response:
        limit = records.limit_of(request.query, _LIST_DEFAULT, _LIST_MAX)
        owner, after = owner_of(request[KEY]), request.query.get("after")
        found = await self._tools.database.run(rows.page_of_batches, owner, after, limit)
        return json_response(
            records.page_object(found, [self._shown(batch) for batch in found[:limit]])
        )

    async def cancel_batch(self, request: web.BaseRequest) -> web.Response:
        owner, batch_id, now = owner_of(request[KEY]), request[PATH_ID], self._tools.now()
        batch = await self._tools.database.run(rows.cancel_batch, owner, batch_id, now)
        self._runner.cancel(batch_id)
        return json_response(self._shown(batch))

    def _shown(self, batch: records.Batch) -> dict[str, object]:
        wait_reason = self._tools.reporter.wait_reason(batch)
        return records.batch_object(batch, self._tools.database.failure or wait_reason)
