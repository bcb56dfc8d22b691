"""A small page of an instance, read for our own sake."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from multidict import CIMultiDict

from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, send
from proxy.upstream.upstream import Upstream


@dataclass(frozen=True, slots=True)
class FetchedBody:
    """What came back.

    Attributes:
        status: HTTP status.
        body: All of the body.
    """

    status: int
    body: bytes


async def fetch(
    upstream: Upstream,
    upstream_request: UpstreamRequest,
    settings: ProxySettings,
    limit_s: float,
    max_bytes: int,
) -> FetchedBody:
    """Return a page.

    Args:
        upstream: Whose.
        upstream_request: What asks for it.
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
        async with limit, send(upstream, upstream_request, settings) as response:
            while chunk := await response.read():
                body += chunk
                if len(body) > max_bytes:
                    raise UpstreamFailed(f"{upstream_request.path} of {upstream.name} is too large")
    except TimeoutError as error:
        sentence = f"{upstream.name} did not answer {upstream_request.path} in {limit_s:g} s"
        raise UpstreamTimeout(sentence) from error
    return FetchedBody(response.status, bytes(body))


def get_request(path: str, query: str = "", **fields: str) -> UpstreamRequest:
    """Return a GET request; `fields` go into its header."""
    return UpstreamRequest("GET", path, query, CIMultiDict(fields), b"")
