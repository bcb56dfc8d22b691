"""The dashboard's page, as far as its server sees it: signs in, and follows the live stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import orjson
from support.proxy_harness import ProxyHarness

from proxy.auth.sessions import PAGE_TOKEN

SESSION: Final = "/corral/v1/session"
LIVE: Final = "/corral/v1/live"


def origin(proxy: ProxyHarness) -> dict[str, str]:
    return {"Origin": proxy.server.url}


async def sign_in(proxy: ProxyHarness, **members: str) -> tuple[int, dict[str, Any]]:
    async with proxy.http.post(SESSION, json=members, headers=origin(proxy)) as response:
        return response.status, await response.json()


async def signed_in(proxy: ProxyHarness) -> None:
    """Sign in with a token; the client keeps its cookie and page token."""
    assert proxy.sessions
    status, answer = await sign_in(proxy, token=proxy.sessions.new_token())
    assert status == 200
    keep(proxy, answer)


def keep(proxy: ProxyHarness, answer: dict[str, Any]) -> None:
    proxy.http.headers[PAGE_TOKEN] = answer["page_token"]


def applied(target: object, patch: object) -> object:
    """RFC 7396, section 2, as it is written there."""
    if not isinstance(patch, dict):
        return patch
    found: dict[str, Any] = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = applied(found.get(name), value)
    return found


class Stream:
    """The events of a stream; `state` is the snapshot with its patches."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.state: Any = {}
        self._response = response

    async def next(self) -> tuple[str, Any]:
        name, data = "", b""
        while line := await self._response.content.readline():
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                data = line[6:]
            elif name:
                return name, self._taken(name, orjson.loads(data))
        return "", None

    async def until(self, wanted: str) -> Any:
        while True:
            name, data = await self.next()
            if name in {wanted, ""}:
                return data

    def _taken(self, name: str, data: Any) -> Any:
        if name == "snapshot":
            self.state = data["state"]
        if name == "patch":
            self.state = applied(self.state, data)
        return data


@asynccontextmanager
async def live(proxy: ProxyHarness, **query: str) -> AsyncIterator[Stream]:
    async with proxy.http.get(LIVE, params=query) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-store"
        yield Stream(response)
