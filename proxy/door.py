"""The one door of the proxy: each request passes it on its way in and its answer on its way out.

In: the request gets its id, whoever asks is checked, and nothing enters while the server drains.
Out: an error becomes an answer that the client's library understands, and the end is told once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from proxy import guard
from proxy.answer import error_response
from proxy.errors import Draining, Internal, ProxyError, UnknownPath, WrongMethod
from proxy.flight import Floor
from proxy.record import CLIENT_GONE, Record, Tell
from proxy.settings import ProxySettings

RECORD: Final = web.RequestKey("record", Record)

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log: Final = logging.getLogger(__name__)


def door(settings: ProxySettings, floor: Floor, tell: Tell) -> Middleware:
    """Return the middleware that all requests pass."""
    is_loopback = guard.is_loopback(settings.host)

    @web.middleware
    async def pass_through(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD] = Record(_request_id(request))
        refused_by: ProxyError | None = None
        try:
            guard.check(request, is_loopback=is_loopback)
            return await _served(request, handler, floor)
        except ProxyError as error:
            refused_by = error
            record.status = error.status
            return error_response(request.path, error)
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        finally:
            record.tell(tell, refused_by)

    return pass_through


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """Put on every answer what all of them carry; a signal handler of aiohttp."""
    response.headers["Server"] = "llama-corral"
    response.headers.update(guard.cors_headers(request))
    if record := request.get(RECORD):
        response.headers["X-Request-Id"] = record.request_id


async def _served(request: web.Request, handler: Handler, floor: Floor) -> web.StreamResponse:
    """Serve one request; whatever goes wrong before the answer begins is a ProxyError."""
    if guard.is_preflight(request):
        return guard.preflight_response(request)
    if floor.is_shut:
        raise Draining
    try:
        return await handler(request)
    except ProxyError:
        raise
    except web.HTTPNotFound as error:
        raise UnknownPath("nothing is served at this path; see /v1/models") from error
    except web.HTTPMethodNotAllowed as error:
        allowed = sorted(error.allowed_methods)
        raise WrongMethod(request.method, request.path, allowed) from error
    except Exception as error:
        _log.exception("request %s met a fault of the proxy", request[RECORD].request_id)
        if request[RECORD].status is not None:
            raise  # the answer has begun: aiohttp closes the connection
        raise Internal("the proxy met a fault of its own; its log has the details") from error


def _request_id(request: web.Request) -> str:
    """Return the client's own name of the request if it is fit for a log, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex[:24]}"
