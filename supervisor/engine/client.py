"""HTTP client of one llama-server: health, identity, warm-up requests, metrics, slots.

HTTP client of one llama-server: health, identity, warm-up requests, metrics. Each request has its
own connection: llama-server closes an idle one after 5 s, and one that streamed without notice. All
endpoints but /health need the engine's key.

This is aiohttp, which the proxy loads anyway: httpx would take 3 MB more of the daemon's memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import orjson

from proxy.upstream.engine_state import SlotState, parse_slots, plain_values
from proxy.upstream.sse import InvalidEvent, Splitter, members_of


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A unix socket, or, if `socket` is None, a TCP port; 0 until the engine reports its port."""

    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def is_known(self) -> bool:
        return self.socket is not None or self.port > 0


# Do not read `/metrics` more often than every 2 to 3 s: at 1 Hz the engine no longer notices
# clients that disconnect.
#
# Source: tools/server/README.md of llama.cpp; behaviour measured on builds 10434 and 11434.

_CONNECT_TIMEOUT_S: Final = 2.0
_TIMEOUT: Final = aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT_S, sock_read=5.0)
# For requests without a known duration: the caller has a deadline.
_NO_READ_TIMEOUT: Final = aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT_S)
_CONNECTIONS_MAX: Final = 8
_RESPONSE_MAX_BYTES: Final = 4 * 1024**2
_STREAM_MAX_BYTES: Final = 64 * 1024**2
_MESSAGE_MAX: Final = 200


class EngineUnreachable(Exception):
    """An engine did not answer, not in time, or with an unusable response."""


class EngineNotConnected(EngineUnreachable):
    """No connection was made, so the engine has not seen the request."""


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """A whole response."""

    status: int
    body: bytes

    @property
    def error(self) -> ErrorResponse | None:
        """The response as an error, unless its status is 200."""
        return None if self.status == 200 else ErrorResponse(self.status, _message(self.body))


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """A status other than 200, with the engine's error message, which may be empty."""

    status: int
    message: str


class EngineClient:
    """Client of one run of an engine; an async context manager."""

    def __init__(self, endpoint: Endpoint, api_key: str) -> None:
        where = "engine" if endpoint.socket else f"{endpoint.host}:{endpoint.port}"
        self._url = f"http://{where}"
        self._key = {"Authorization": f"Bearer {api_key}"}
        self._http = aiohttp.ClientSession(
            connector=_connector(endpoint), cookie_jar=aiohttp.DummyCookieJar(), timeout=_TIMEOUT
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def is_healthy(self) -> bool:
        try:
            return (await self.get("/health")).status == 200
        except EngineUnreachable:
            return False

    async def is_ours(self) -> bool:
        """Whether this engine accepts our key and rejects requests without one.

        On a TCP port another server may have been faster; it has another key, or none.
        """
        try:
            with_key = await self.get("/props")
            without_key = await self._request("GET", "/props")
        except EngineUnreachable:
            return False
        return with_key.status != 401 and without_key.status == 401

    async def one_token(self) -> ErrorResponse | None:
        """Generate one token. No deadline: the first token of a large model may take long.

        Raises:
            EngineUnreachable: No response.
        """
        body = {"prompt": "Hello", "n_predict": 1, "cache_prompt": False}
        return (await self.post("/completion", body)).error

    async def one_vector(self) -> ErrorResponse | None:
        """Make an embedding of a short text. No deadline."""
        return (await self.post("/embedding", {"content": "Hello"})).error

    async def metrics(self) -> Mapping[str, float] | ErrorResponse:
        """The engine's counters and gauges, by name without the prefix `llamacpp:`."""
        response = await self.get("/metrics")
        return response.error or plain_values(response.body.decode("utf-8", "replace"))

    async def get(self, path: str) -> EngineResponse:
        """Send a GET request.

        Raises:
            EngineUnreachable: No response.
        """
        return await self._request("GET", path, headers=self._key)

    async def post(self, path: str, body: Mapping[str, Any]) -> EngineResponse:
        """Send a request without a deadline."""
        return await self._request("POST", path, **self._posted(body))

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[AsyncIterator[Mapping[str, Any]] | ErrorResponse]:
        """Send a request without a deadline, and read its server-sent events as JSON objects.

        Raises:
            EngineUnreachable: No response, or it broke off; also while events are read.
        """
        async with self._opened("POST", path, self._posted(body)) as response:
            if response.status == 200:
                yield _events(response)
            else:
                yield ErrorResponse(response.status, _message(await _body(response)))

    def _posted(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "data": orjson.dumps(body),
            "headers": {**self._key, "Content-Type": "application/json"},
            "timeout": _NO_READ_TIMEOUT,
        }

    async def _request(self, method: str, path: str, **options: Any) -> EngineResponse:
        async with self._opened(method, path, options) as response:
            return EngineResponse(response.status, await _body(response))

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, options: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._http.request(method, f"{self._url}{path}", **options) as response:
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineNotConnected(f"{method} {path}: {error!r}") from error
        except (aiohttp.ClientError, InvalidEvent, _TooLarge) as error:
            raise EngineUnreachable(f"{method} {path}: {error!r}") from error


def _connector(endpoint: Endpoint) -> aiohttp.BaseConnector:
    if endpoint.socket is None:
        return aiohttp.TCPConnector(limit=_CONNECTIONS_MAX, force_close=True)
    return aiohttp.UnixConnector(str(endpoint.socket), limit=_CONNECTIONS_MAX, force_close=True)


class _TooLarge(Exception):
    """A response exceeds its byte limit."""


async def _chunks(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    size_bytes = 0
    async for chunk in response.content.iter_any():
        size_bytes += len(chunk)
        if size_bytes > max_bytes:
            raise _TooLarge(f"more than {max_bytes} bytes")
        yield chunk


async def _body(response: aiohttp.ClientResponse) -> bytes:
    return b"".join([chunk async for chunk in _chunks(response, _RESPONSE_MAX_BYTES)])


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    splitter = Splitter()
    async for chunk in _chunks(response, _STREAM_MAX_BYTES):
        for event in splitter.feed(chunk):
            if members := members_of(event):
                yield members


def _message(body: bytes) -> str:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:_MESSAGE_MAX].decode("utf-8", "replace")
    match content:
        case {"error": {"message": str(message)}}:
            return message[:_MESSAGE_MAX]
        case _:
            return ""


# Measured on build 10434, and held by tests against the real engine:
#
# - An id is taken modulo the number of slots: action 7 of 2 slots runs on slot 1.
# - An action on a busy slot waits until that is idle, and delays nothing else.
# - A file is written in place. A full disk is answered with 500 and leaves a partial file.
# - A truncated file ends the engine; so only verified files may be restored.
# - A slot that was restored and never used since does not report how many tokens it holds.
# - The contents of idle slots are also put into cache-ram whenever a request starts elsewhere, but
#   after that request has looked there for its own. One that names a slot does not look there.
# - A request of no tokens leaves a slot as it is, and counts as its latest.
#
# No action has a deadline of its own. Source: tools/server/README.md of llama.cpp, from
# "POST /slots/{id_slot}?action=save" on.


@dataclass(frozen=True, slots=True)
class SlotFileInfo:
    """The content of a slot file, as the engine reports it.

    Attributes:
        duration_s: For which the engine wrote or read it, and computed nothing; 0 where it does not
            say.
    """

    tokens: int
    size_bytes: int
    duration_s: float = field(default=0.0, compare=False)


async def get_slots(client: EngineClient) -> tuple[SlotState, ...] | ErrorResponse:
    """Read the state of every slot.

    Raises:
        EngineUnreachable: No response, or not a list of slots.
    """
    response = await client.get("/slots")
    if response.error:
        return response.error
    found = parse_slots(response.body)
    if found is None:
        raise EngineUnreachable("GET /slots: not a list of slots")
    return tuple(found)


async def save(client: EngineClient, id_slot: int, filename: str) -> SlotFileInfo | ErrorResponse:
    """Write a slot's KV cache into the engine's directory for slot files."""
    return await _transfer(client, id_slot, "save", filename, ("n_saved", "n_written"))


async def restore(
    client: EngineClient, id_slot: int, filename: str
) -> SlotFileInfo | ErrorResponse:
    """Fill a slot from a file of that directory, which must have been verified."""
    return await _transfer(client, id_slot, "restore", filename, ("n_restored", "n_read"))


async def refresh_slot(client: EngineClient, id_slot: int) -> None:
    """Mark a slot as the latest used, by a request of no tokens; a rejection is ignored."""
    await client.post("/completion", {"prompt": [[]], "n_predict": 0, "id_slot": id_slot})


async def cached_tokens(
    client: EngineClient, id_slot: int, prompt: Sequence[int]
) -> int | ErrorResponse:
    """Continue a prompt of tokens in a slot; return how many of them it held already.

    It generates some tokens, so that the engine drafts if it does. Counted by those computed, which
    older builds report too.

    Raises:
        EngineUnreachable: No response.
    """
    body = {"prompt": list(prompt), "n_predict": 8, "id_slot": id_slot, "cache_prompt": True}
    response = await client.post("/completion", body)
    if response.error:
        return response.error
    try:
        return len(prompt) - int(orjson.loads(response.body)["timings"]["prompt_n"])
    except (ValueError, TypeError, KeyError) as error:
        return ErrorResponse(response.status, f"no timings: {error!r}")


async def erase(client: EngineClient, id_slot: int) -> None:
    """Discard a slot's KV cache."""
    await client.post(f"/slots/{id_slot}?action=erase", {})


async def _transfer(
    client: EngineClient, id_slot: int, action: str, filename: str, keys: tuple[str, str]
) -> SlotFileInfo | ErrorResponse:
    path = f"/slots/{id_slot}?action={action}"
    response = await client.post(path, {"filename": filename})
    if response.error:
        return response.error
    try:
        members = orjson.loads(response.body)
        duration_ms = float(members.get("timings", {}).get(f"{action}_ms", 0.0))
        tokens, size_bytes = (int(members[key]) for key in keys)
        return SlotFileInfo(tokens, size_bytes, duration_ms / 1000)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineUnreachable(f"POST {path}: {error!r}") from error
