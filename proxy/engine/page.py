"""A small page of an instance, read for our own sake."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from multidict import CIMultiDict

from proxy.engine.exchange import Letter, exchange
from proxy.engine.upstream import Upstream
from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.settings import ProxySettings


@dataclass(frozen=True, slots=True)
class Page:
    """What came back.

    Attributes:
        status: HTTP status.
        body: All of the body.
    """

    status: int
    body: bytes


async def fetch(
    upstream: Upstream, letter: Letter, settings: ProxySettings, limit_s: float, max_bytes: int
) -> Page:
    """Return a page.

    Args:
        upstream: Whose.
        letter: What asks for it.
        settings: The proxy's limits.
        limit_s: Seconds for all of it, above 0.
        max_bytes: Largest body taken.

    Raises:
        UpstreamTimeout: It did not come in time.
        UpstreamFailed: It did not come, or is too large.
    """
    body = bytearray()
    limit = asyncio.timeout(limit_s)
    try:
        async with limit, exchange(upstream, letter, settings) as reply:
            while chunk := await reply.read():
                body += chunk
                if len(body) > max_bytes:
                    raise UpstreamFailed(f"{letter.path} of {upstream.name} is too large")
    except TimeoutError as error:
        sentence = f"{upstream.name} did not answer {letter.path} in {limit_s:g} s"
        raise UpstreamTimeout(sentence) from error
    return Page(reply.status, bytes(body))


def question(path: str, query: str = "", **fields: str) -> Letter:
    """Return a letter that asks for a page; `fields` go into its header."""
    return Letter("GET", path, query, CIMultiDict(fields), b"")
