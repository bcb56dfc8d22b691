"""HTTP client of one llama-server: health, identity, warm-up requests, metrics, slots.

Each request has its own connection: llama-server closes an idle connection after 5 s, and closes
one that streamed without notice. All endpoints except /health need the engine's key.

This uses aiohttp, which the proxy loads anyway: httpx would take 3 MB more of the daemon's memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import orjson

from proxy.cache.fingerprint import Scales, lora_of
from proxy.upstream.engine_state import SlotState, parse_slots, plain_values
from proxy.upstream.http1 import InvalidEvent, Splitter, members_of


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A unix socket, or a TCP port if `socket` is None; 0 until the engine reports its port."""

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
_MESSAGE_MAX: Final = 200


class EngineUnreachable(Exception):
    """An engine gave no response, or none in time, or an unusable one."""


class EngineNotConnected(EngineUnreachable):
    """No connection was made, so the engine has not seen the request."""


@dataclass(frozen=True, slots=True)
class EngineResponse:
    status: int
    body: bytes

    @property
    def error(self) -> ErrorResponse | None:
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
        options: dict[str, Any] = {"limit": _CONNECTIONS_MAX, "force_close": True}
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(str(endpoint.socket), **options)
            if endpoint.socket
            else aiohttp.TCPConnector(**options)
        )
        self._http = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=_TIMEOUT
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

        On a TCP port another server may have been faster to listen; it has another key, or none.
        """
        try:
            with_key = await self.get("/props")
            without_key = await self._request("GET", "/props")
        except EngineUnreachable:
            return False
        return with_key.status != 401 and without_key.status == 401

    async def generate_token(self) -> ErrorResponse | None:
        """Generate one token, without a deadline: it may take long. Raises EngineUnreachable."""
        body = {"prompt": "Hello", "n_predict": 1, "cache_prompt": False}
        return (await self.post("/completion", body)).error

    async def make_embedding(self) -> ErrorResponse | None:
        """Compute the embedding of a short text. No deadline."""
        return (await self.post("/embedding", {"content": "Hello"})).error

    async def read_metrics(self) -> Mapping[str, float] | ErrorResponse:
        """Return the engine's counters and gauges, by name without the prefix `llamacpp:`."""
        response = await self.get("/metrics")
        return response.error or plain_values(response.body.decode("utf-8", "replace"))

    async def get(self, path: str) -> EngineResponse:
        """Send a GET request; raises EngineUnreachable."""
        return await self._request("GET", path, headers=self._key)

    async def post(self, path: str, body: Mapping[str, Any]) -> EngineResponse:
        """Send a request without a deadline."""
        return await self._request("POST", path, **self._post_options(body))

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[AsyncIterator[Mapping[str, Any]] | ErrorResponse]:
        """Send a request without a deadline, and yield its server-sent events as JSON objects.

        Raises EngineUnreachable: no response, or it broke off; also raised while events are read.
        """
        async with self._open("POST", path, self._post_options(body)) as response:
            if response.status == 200:
                yield _events(response)
            else:
                yield ErrorResponse(response.status, _message(await _body(response)))

    def _post_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "data": orjson.dumps(body),
            "headers": {**self._key, "Content-Type": "application/json"},
            "timeout": _NO_READ_TIMEOUT,
        }

    async def _request(self, method: str, path: str, **options: Any) -> EngineResponse:
        async with self._open(method, path, options) as response:
            return EngineResponse(response.status, await _body(response))

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, options: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._http.request(method, f"{self._url}{path}", **options) as response:
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineNotConnected(f"{method} {path}: {error!r}") from error
        except (aiohttp.ClientError, InvalidEvent) as error:
            raise EngineUnreachable(f"{method} {path}: {error!r}") from error


async def _chunks(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    size_bytes = 0
    async for chunk in response.content.iter_any():
        size_bytes += len(chunk)
        if size_bytes > max_bytes:
            raise aiohttp.ClientPayloadError(f"more than {max_bytes} bytes")
        yield chunk


async def _body(response: aiohttp.ClientResponse) -> bytes:
    return b"".join([chunk async for chunk in _chunks(response, 4 * 1024**2)])


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    splitter = Splitter()
    async for chunk in _chunks(response, 64 * 1024**2):
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


# Measured on build 10434; tests check it against the real engine:
#
# - An id is taken modulo the number of slots: with 2 slots, an action on slot 7 runs on slot 1.
# - An action on a busy slot waits until the slot is idle, and delays nothing else.
# - A file is written in place. On a full disk the engine answers 500 and leaves a partial file.
# - A truncated file ends the engine; so only verified files may be restored.
# - A slot that was restored and not used since does not report how many tokens it holds.
# - Whenever a request starts, the contents of idle slots are copied into cache-ram, after that
#   request has searched cache-ram. A request that names a slot does not search it.
# - A request of no tokens leaves the content of a slot, and counts as the slot's latest use.
#
# No action has its own deadline. Source: tools/server/README.md of llama.cpp, from
# "POST /slots/{id_slot}?action=save" on.


@dataclass(frozen=True, slots=True)
class SlotFileInfo:
    """The content of a slot file, as the engine reports it."""

    tokens: int
    size_bytes: int
    # Time in which the engine wrote or read it and computed nothing; 0 if the engine does not
    # report it.
    duration_s: float = field(default=0.0, compare=False)


async def get_slots(client: EngineClient) -> tuple[SlotState, ...] | ErrorResponse:
    """Read the state of every slot; raises EngineUnreachable."""
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
    """Fill a slot from a file of that directory. The caller must have verified the file."""
    return await _transfer(client, id_slot, "restore", filename, ("n_restored", "n_read"))


async def refresh_slot(client: EngineClient, id_slot: int, scales: Scales = ()) -> None:
    """Make a slot the latest used one, by a request of no tokens; ignores a rejection.

    The slot's content stays, unless other adapters than those of `scales` computed it; these are
    the slot's adapters from then on, also for content that is restored into it.
    """
    body: dict[str, Any] = {"prompt": [[]], "n_predict": 0, "id_slot": id_slot}
    await client.post("/completion", {**body, "lora": lora_of(scales)} if scales else body)


async def cached_tokens(
    client: EngineClient, id_slot: int, prompt: Sequence[int]
) -> int | ErrorResponse:
    """Continue a prompt of tokens in a slot; return how many of them the slot held already.

    Generates some tokens, so that an engine with a draft model uses it. The result is computed from
    the number of computed tokens, which older builds report too. Raises EngineUnreachable: no
    response.
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
