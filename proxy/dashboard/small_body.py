"""The few members that a request of the dashboard's page sends."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from proxy.body.bodies import Bodies
from proxy.body.read import check_complexity, members_of, read_body
from proxy.errors import BadRequest
from proxy.request import client_of

_MAX_BYTES: Final = 4096


async def read_members(request: web.BaseRequest, bodies: Bodies) -> dict[str, Any]:
    """Read a JSON object of at most 4 KiB.

    Raises:
        BadRequest: It is larger, does not say its size, or is no JSON object.
        ProxyError: As `read_body` does.
    """
    if request.content_length is None or request.content_length > _MAX_BYTES:
        raise BadRequest(f"the body needs a Content-Length of at most {_MAX_BYTES} bytes")
    with bodies.share(client_of(request)) as share:
        body = await read_body(request, share)
        await check_complexity(body, share)
        return members_of(body)
