"""`/corral/v1/slot-files`: other machines copy slot files from here, or have files to copy.

A slot file has the tokens of a client's conversation, so only an admin's key may read one, as for
the places of all prompts. A file is found by its name in the slot store's index; no text of a
request becomes a path. All copies together are limited in number and in bytes per second.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from aiohttp import web
from attrs import define, field

from proxy.auth.access import SLOT_FILES
from proxy.auth.api_keys import visible_client
from proxy.cache.fingerprint import SlotFile
from proxy.common.headers import RESPONSE_HEADERS
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest, Forbidden, NotFound, Unavailable
from proxy.http.body import read_members
from proxy.http.middleware import PATH_ID, Routes, json_response
from proxy.observe.record import InFlightRequest
from proxy.request.request import cache_owner, client_of

_COPIES_MAX: Final = 8
_MANIFESTS_MAX: Final = 64
_TURNS_MAX: Final = 64
_PIECE_BYTES: Final = 256 * 1024
_RETRY_AFTER_S: Final = 1


@dataclass(frozen=True, slots=True)
class StoredSlotFile:
    path: Path
    size_bytes: int
    sha256: bytes


class SlotFileHost(Protocol):
    """The slot store, for other machines."""

    @property
    def send_rate(self) -> float:
        """The bytes per second of all copies together; 0: no file is copied from here."""

    async def manifest(self, cache_key: str, turn_hashes: Sequence[int], /) -> str | None:
        """Return the manifest of the file that has most of a conversation, the latest turn last."""

    async def stored(self, name: str, /) -> StoredSlotFile | None: ...

    async def take_offered(
        self, process: str, manifests: Sequence[str], /
    ) -> Sequence[tuple[str, SlotFile]]:
        """Copy the files of a node that are worth it; return them with their models."""


class Pace:
    """Spreads bytes over time, so that all senders together keep to a rate."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def wait_s(self, size_bytes: int, rate: float, now_s: float) -> float:
        """Return how long to wait before so many bytes may be sent."""
        begins_at_s = max(self._free_at_s, now_s)
        self._free_at_s = begins_at_s + size_bytes / rate
        return begins_at_s - now_s


@define(eq=False, slots=False)
class SlotFilesEndpoint(Feature):
    _core: Core
    _host: SlotFileHost
    _pace: Pace = field(factory=Pace, init=False)
    _copies: int = field(default=0, init=False)

    def add_routes(self, routes: Routes) -> None:
        routes.add(SLOT_FILES, get=self.find, post=self.take)
        routes.add(SLOT_FILES + "/{id}", get=self.send)

    async def find(self, request: web.BaseRequest) -> web.Response:
        """Answer with the manifest of a conversation's file, or 204."""
        _check(request)
        query = request.query
        try:
            words = [word for word in query.get("turns", "").split(",") if word]
            turns = [int(word, 16) for word in words[-_TURNS_MAX:]]
        except ValueError as error:
            raise BadRequest("turns must be hexadecimal numbers with commas between") from error
        found = None
        if self._host.send_rate:
            found = await self._host.manifest(query.get("cache_key", ""), turns)
        return web.Response(
            text=found or "", status=200 if found else 204, content_type="application/json"
        )

    async def send(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send a file, or a range of it, with its SHA-256 (RFC 9530)."""
        _check(request)
        rate, name = self._host.send_rate, request[PATH_ID]
        file = await self._host.stored(name) if rate else None
        if file is None:
            raise NotFound("no such slot file")
        if self._copies >= _COPIES_MAX:
            raise Unavailable(f"{_COPIES_MAX} slot files are being copied", _RETRY_AFTER_S)
        etag = f'"{file.sha256.hex()}"'
        headers = {
            **request[RESPONSE_HEADERS],
            "Accept-Ranges": "bytes",
            "ETag": etag,
            "Repr-Digest": f"sha-256=:{b64encode(file.sha256).decode()}:",
        }
        wanted = _range(request, etag, file.size_bytes)
        if wanted is None:
            headers["Content-Range"] = f"bytes */{file.size_bytes}"
            return web.Response(status=416, headers=headers)
        response = web.StreamResponse(headers=headers)
        if len(wanted) < file.size_bytes:
            response.set_status(206)
            last = wanted.stop - 1
            response.headers["Content-Range"] = f"bytes {wanted.start}-{last}/{file.size_bytes}"
        response.content_type = "application/octet-stream"
        response.content_length = len(wanted)
        await response.prepare(request)
        if request.method != "HEAD":
            self._copies += 1
            try:
                await self._write(file, wanted, response, request)
            finally:
                self._copies -= 1
        return response

    async def _write(
        self,
        file: StoredSlotFile,
        wanted: range,
        response: web.StreamResponse,
        request: web.BaseRequest,
    ) -> None:
        """Send bytes of a file; abort the connection if it is deleted or shortened meanwhile."""
        for begins_at in range(wanted.start, wanted.stop, _PIECE_BYTES):
            size_bytes = min(_PIECE_BYTES, wanted.stop - begins_at)
            try:
                piece = await asyncio.to_thread(_read, file.path, begins_at, size_bytes)
            except OSError:
                piece = b""
            if len(piece) < size_bytes and request.transport:
                request.transport.abort()
                return
            rate = max(1.0, self._host.send_rate)
            await asyncio.sleep(self._pace.wait_s(size_bytes, rate, time.monotonic()))
            await response.write(piece)

    async def take(self, request: web.BaseRequest) -> web.Response:
        """Copy the files that another machine offers; answer with the names of those taken."""
        _check(request)
        core, client = self._core, client_of(request)
        in_flight = InFlightRequest(core.server_state.in_flight)
        with in_flight, core.bodies.share(client) as share:
            members = await read_members(request, share)
            match members:
                case {"process": str(process), "manifests": list(manifests)}:
                    texts = [text for text in manifests if isinstance(text, str)]
                case _:
                    raise BadRequest("an offer has a process and manifests")
            taken = await self._host.take_offered(process, texts[:_MANIFESTS_MAX])
        owner = cache_owner(request, core.settings)
        for model, file in taken:
            core.router.cache.report_file(model, file, client, owner)
        return json_response({"taken": [file.name for _, file in taken]})


def _check(request: web.BaseRequest) -> None:
    """Check that a request may read all conversations; raises Forbidden."""
    if (client := visible_client(request)) is not None:
        raise Forbidden(f"API key {client!r} is not an admin's (admin = true in its file)")


def _range(request: web.BaseRequest, etag: str, size_bytes: int) -> range | None:
    """Return the wanted bytes; None if there are none. Source: RFC 9110, section 14."""
    whole = range(size_bytes)
    if request.headers.get("If-Range", etag) != etag:
        return whole
    try:
        asked = request.http_range
    except ValueError:
        return None
    wanted = whole[asked]
    return wanted if wanted or not size_bytes else None


def _read(path: Path, begins_at: int, size_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begins_at)
        return file.read(size_bytes)
