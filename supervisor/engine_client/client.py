"""Speaks to one llama-server's own endpoints: health, identity, one token, counters.

What is asked about slots stands in `slots.py`, prompts to be read ahead in `warm.py`.

Every call has a deadline and its own connection: llama-server closes an idle one after 5 s and one
that streamed without a word, and our calls are rare. All answers but health need the engine's key.

Mind what a look costs: a poll of `/metrics` at 1 Hz or more keeps the engine from noticing clients
that left. Ask every 2 to 3 s at most.

Source: tools/server/README.md of llama.cpp; behaviour measured on builds 10434 and 11434.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx

from supervisor.engine_client.endpoint import Endpoint

_TIMEOUT: Final = httpx.Timeout(5.0, connect=2.0)
# For what takes as long as it takes: the deadline is the caller's.
_PATIENT: Final = httpx.Timeout(None, connect=2.0)
_METRIC_PREFIX: Final = "llamacpp:"


class EngineUnreachable(Exception):
    """An engine did not answer, or not in time."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An answer that is not 200.

    Attributes:
        status: HTTP status.
        message: The engine's own words, possibly empty.
    """

    status: int
    message: str


class EngineClient:
    """A client of one engine; use it as an async context manager.

    Args:
        endpoint: Where the engine listens; its port must be known.
        api_key: What it wants to be shown.
    """

    def __init__(self, endpoint: Endpoint, api_key: str) -> None:
        socket = None if endpoint.socket is None else str(endpoint.socket)
        self._key = {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=f"http://{endpoint.host}:{endpoint.port}"
            if socket is None
            else "http://engine",
            timeout=_TIMEOUT,
            trust_env=False,
            transport=httpx.AsyncHTTPTransport(
                uds=socket,
                limits=httpx.Limits(max_keepalive_connections=0),
                # No engine of ours speaks TLS; an empty context spares reading certificates.
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            ),
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(exc_type, exc_value, traceback)

    async def is_healthy(self) -> bool:
        """Return whether the engine says it can serve; an engine that is silent cannot."""
        try:
            return (await self.get("/health")).status_code == 200
        except EngineUnreachable:
            return False

    async def is_ours(self) -> bool:
        """Return whether this engine knows our key, and asks for it.

        On a TCP port a stranger may have been faster; it either has another key, or none.
        """
        try:
            known = await self.get("/props")
            unknown = await self._call("GET", "/props")
        except EngineUnreachable:
            return False
        return known.status_code != 401 and unknown.status_code == 401

    async def one_token(self) -> ErrorResponse | None:
        """Have one token generated; None when that worked.

        Raises:
            EngineUnreachable: No answer. There is no deadline on the answer but the caller's: the
                first token of a large model may take long.
        """
        answer = await self.post(
            "/completion", {"prompt": "Hello", "n_predict": 1, "cache_prompt": False}
        )
        return None if answer.status_code == 200 else error_response(answer)

    async def one_vector(self) -> ErrorResponse | None:
        """Have a vector made of a short text; None when that worked.

        Raises:
            EngineUnreachable: No answer. There is no deadline but the caller's, as of `one_token`.
        """
        answer = await self.post("/embedding", {"content": "Hello"})
        return None if answer.status_code == 200 else error_response(answer)

    async def metrics(self) -> Mapping[str, float] | ErrorResponse:
        """Return the engine's counters and gauges, by name without the prefix `llamacpp:`.

        Raises:
            EngineUnreachable: No answer.
        """
        answer = await self.get("/metrics")
        if answer.status_code != 200:
            return error_response(answer)
        return parse_metrics(answer.text)

    async def get(self, path: str) -> httpx.Response:
        """Return the answer to a question that is answered at once.

        Raises:
            EngineUnreachable: No answer.
        """
        return await self._call("GET", path, headers=self._key)

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Return the answer to an order, however long it takes: the deadline is the caller's.

        Raises:
            EngineUnreachable: No answer.
        """
        return await self._call("POST", path, json=body, headers=self._key, timeout=_PATIENT)

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """Hold a streamed answer for the length of the block, whose reading may fail too.

        Raises:
            EngineUnreachable: No answer, or it broke.
        """
        try:
            async with self._http.stream(
                "POST", path, json=body, headers=self._key, timeout=_PATIENT
            ) as answer:
                yield answer
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"POST {path}: {error!r}") from error

    async def _call(self, method: str, path: str, **what: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **what)
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"{method} {path}: {error!r}") from error


def parse_metrics(text: str) -> dict[str, float]:
    """Return the plain samples of a Prometheus text, by name; labelled ones are left out.

    Source: Prometheus text exposition format 0.0.4.
    """
    samples = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if not name.startswith(_METRIC_PREFIX) or "{" in name:
            continue
        try:
            samples[name.removeprefix(_METRIC_PREFIX)] = float(value.split()[0])
        except (ValueError, IndexError):
            continue
    return samples


def error_response(answer: httpx.Response) -> ErrorResponse:
    """Return an answer that is not 200 as what it is."""
    return ErrorResponse(answer.status_code, _words(answer))


def _words(answer: httpx.Response) -> str:
    try:
        told = answer.json()
    except ValueError:
        return answer.text[:200]
    match told:
        case {"error": {"message": str(message)}}:
            return message[:200]
        case _:
            return ""
