"""What the proxy knows of one instance, and how it is reached.

Each request has a connection of its own, closed with its answer. An instance closes a connection
after a streamed answer without saying so, and others after 5 s or 100 requests, so a kept one may
be dead; a new one over a unix socket costs 0.1 ms, and closing it is what frees the slot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from proxy.settings import ProxySettings

# Only the path and query of the URL matter to a unix socket; the engine wants some Host.
_UNIX_AUTHORITY = "localhost"


@dataclass(frozen=True, slots=True)
class Upstream:
    """One instance that may be asked.

    Attributes:
        name: The instance's name, unique among all.
        model: The id of the model it serves.
        slots: Sequences it decodes at once, at least 1.
        socket: Path of its unix socket, or None where it listens on TCP.
        host: Its address where `socket` is None.
        port: Its TCP port where `socket` is None.
        api_key: The key that it asks for; empty where it asks for none.
        aliases: Other names of the model.
    """

    name: str
    model: str
    slots: int
    socket: str | None
    host: str
    port: int
    api_key: str = field(repr=False)
    aliases: tuple[str, ...] = ()

    def url(self, path: str, query: str) -> URL:
        """Return the address of a page; path and query are taken as sent, already quoted."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        authority = _UNIX_AUTHORITY if self.socket else f"{host}:{self.port}"
        return URL(f"http://{authority}{path}{'?' if query else ''}{query}", encoded=True)


@asynccontextmanager
async def connected(
    upstream: Upstream, settings: ProxySettings
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session for one request; its connection is closed when the block ends."""
    async with aiohttp.ClientSession(
        connector=_connector(upstream),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(
            total=None,
            sock_connect=settings.connect_timeout_s,
            sock_read=settings.silence_timeout_s,
        ),
        auto_decompress=False,
        trust_env=False,
    ) as session:
        yield session


def _connector(upstream: Upstream) -> aiohttp.BaseConnector:
    if upstream.socket:
        return aiohttp.UnixConnector(upstream.socket, force_close=True)
    return aiohttp.TCPConnector(force_close=True)
