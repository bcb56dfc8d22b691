"""Speaks to one llama-server's own endpoints: health, identity, one token, slots, counters.

Every call has a deadline and its own connection: llama-server closes an idle one after 5 s and one
that streamed without a word, and our calls are rare. All answers but health need the engine's key.

Mind what a look costs: a poll of `/slots` or `/metrics` at 1 Hz or more keeps the engine from
noticing clients that left, and `/slots` wakes a sleeping one. Ask every 2 to 3 s at most.

Source: tools/server/README.md of llama.cpp; behaviour measured on builds 10434 and 11434.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx

from supervisor.life.launch import Endpoint

_TIMEOUT: Final = httpx.Timeout(5.0, connect=2.0)
_METRIC_PREFIX: Final = "llamacpp:"


class EngineSilent(Exception):
    """An engine did not answer, or not in time."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An answer that is not 200.

    Attributes:
        status: HTTP status.
        message: The engine's own words, possibly empty.
    """

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Slot:
    """One sequence an engine can decode.

    Attributes:
        id_slot: Its number, from 0.
        busy: Whether it works on a request.
        n_ctx: Its context, in tokens.
        n_decoded: Tokens generated for the current or last request.
    """

    id_slot: int
    busy: bool
    n_ctx: int
    n_decoded: int


@dataclass(frozen=True, slots=True)
class Props:
    """What an engine says of itself.

    Attributes:
        slots: Sequences it decodes at a time.
        n_ctx: Context of each, in tokens.
        model_path: The GGUF it serves.
        build: Its build, as it tells it; empty where it does not.
    """

    slots: int
    n_ctx: int
    model_path: str
    build: str


class Llama:
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
            return (await self._get("/health")).status_code == 200
        except EngineSilent:
            return False

    async def is_ours(self) -> bool:
        """Return whether this engine knows our key, and asks for it.

        On a TCP port a stranger may have been faster; it either has another key, or none.
        """
        try:
            known = await self._get("/props")
            unknown = await self._call("GET", "/props")
        except EngineSilent:
            return False
        return known.status_code != 401 and unknown.status_code == 401

    async def one_token(self) -> Refused | None:
        """Have one token generated; None when that worked.

        Raises:
            EngineSilent: No answer. There is no deadline on the answer but the caller's: the first
                token of a large model may take long.
        """
        answer = await self._call(
            "POST",
            "/completion",
            json={"prompt": "Hello", "n_predict": 1, "cache_prompt": False},
            headers=self._key,
            timeout=httpx.Timeout(None, connect=2.0),
        )
        return None if answer.status_code == 200 else Refused(answer.status_code, _words(answer))

    async def slots(self) -> tuple[Slot, ...] | Refused:
        """Return the engine's slots, in their order.

        Raises:
            EngineSilent: No answer.
        """
        answer = await self._get("/slots")
        if answer.status_code != 200:
            return Refused(answer.status_code, _words(answer))
        return tuple(_slot(fields) for fields in answer.json())

    async def metrics(self) -> Mapping[str, float] | Refused:
        """Return the engine's counters and gauges, by name without the prefix `llamacpp:`.

        Raises:
            EngineSilent: No answer.
        """
        answer = await self._get("/metrics")
        if answer.status_code != 200:
            return Refused(answer.status_code, _words(answer))
        return read_metrics(answer.text)

    async def props(self) -> Props | Refused:
        """Return what the engine says of itself.

        Raises:
            EngineSilent: No answer.
        """
        answer = await self._get("/props")
        if answer.status_code != 200:
            return Refused(answer.status_code, _words(answer))
        told = answer.json()
        return Props(
            slots=told.get("total_slots", 1),
            n_ctx=told.get("default_generation_settings", {}).get("n_ctx", 0),
            model_path=told.get("model_path", ""),
            build=told.get("build_info", ""),
        )

    async def _get(self, path: str) -> httpx.Response:
        return await self._call("GET", path, headers=self._key)

    async def _call(self, method: str, path: str, **what: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **what)
        except httpx.HTTPError as error:
            raise EngineSilent(f"{method} {path}: {error!r}") from error


def read_metrics(text: str) -> dict[str, float]:
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


def _slot(fields: Mapping[str, Any]) -> Slot:
    # `next_token` is a list since it is reported per sequence, and an object before.
    token = fields.get("next_token") or {}
    token = token[0] if isinstance(token, list) else token
    return Slot(
        id_slot=fields["id"],
        busy=fields.get("is_processing", False),
        n_ctx=fields.get("n_ctx", 0),
        n_decoded=token.get("n_decoded", 0),
    )


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
