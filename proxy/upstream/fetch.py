"""Reads small responses of an instance for the proxy's own use."""

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
    status: int
    body: bytes


async def fetch(
    upstream: Upstream,
    upstream_request: UpstreamRequest,
    settings: ProxySettings,
    limit_s: float,
    max_bytes: int,
) -> FetchedBody:
    """The whole response, within `limit_s` seconds.

    Raises:
        UpstreamTimeout: It was not complete in time.
        UpstreamFailed: The instance failed, or the body is too large.
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
        message = f"{upstream.name} did not answer {upstream_request.path} in {limit_s:g} s"
        raise UpstreamTimeout(message) from error
    return FetchedBody(response.status, bytes(body))


def get_request(path: str, query: str = "", **fields: str) -> UpstreamRequest:
    return UpstreamRequest("GET", path, query, CIMultiDict(fields), b"")
