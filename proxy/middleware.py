"""The aiohttp middleware that every request and every response passes.

In: the request gets its id, whoever asks is checked, and nothing enters while the server drains.
Out: an error becomes an answer that the client's library understands, and the end is told once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.access_log import CLIENT_GONE, AccessRecord, Emit
from proxy.auth.api_keys import KEY, OPEN_PATHS, ApiKeys
from proxy.auth.keys_file import read_keys
from proxy.auth.origin import OriginPolicy, is_preflight, preflight_response
from proxy.auth.rate_limit import RateLimiter
from proxy.connections import Connections
from proxy.errors import (
    Draining,
    ExpectationFailed,
    InternalError,
    MethodNotAllowed,
    NotFound,
    ProxyError,
    Unauthorized,
)
from proxy.forward.client_response import error_body, error_response
from proxy.router.in_flight import ServerState
from proxy.settings import ProxySettings

ACCESS_RECORD: Final = web.RequestKey("record", AccessRecord)
SERVER: Final = "llama-corral"

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log: Final = logging.getLogger(__name__)


def check(settings: ProxySettings) -> None:
    """Find out now what would keep a proxy from being built.

    Raises:
        ConfigError: An origin, a host or the keys file is wrong.
    """
    OriginPolicy(settings)
    if settings.api_keys_file is not None:
        read_keys(settings.api_keys_file)


class RequestMiddleware:
    """The middleware that all requests pass, and what signs every answer.

    Args:
        settings: Hosts, origins and keys.
        server_state: What is under way.
        tell: Hears how each request ended.
        connections: Told which of them a request was let in on.

    Raises:
        ConfigError: An origin, a host or the keys file is wrong.
    """

    def __init__(
        self,
        settings: ProxySettings,
        server_state: ServerState,
        tell: Emit,
        connections: Connections[Hashable],
    ) -> None:
        self._connections = connections
        self._guard = OriginPolicy(settings)
        self._keyring = ApiKeys(settings.api_keys_file, tell)
        self._limits = RateLimiter()
        self._server_state = server_state
        self._tell = tell

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let one request through, or say why not."""
        record = request[ACCESS_RECORD] = AccessRecord(_request_id(request))
        refused_by: ProxyError | None = None
        try:
            self._guard.check(request)
            return await self._served(request, handler)
        except ProxyError as error:
            refused_by = error
            record.status = error.status
            return error_response(request.path, error)
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        finally:
            record.emit(self._tell, refused_by)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Put on every answer what all of them carry; a signal handler of aiohttp."""
        if response.status == 417 and isinstance(response, web.HTTPExpectationFailed):
            # aiohttp's own, past all middlewares
            _say(response, request.path, ExpectationFailed())
        response.headers["Server"] = SERVER
        if "Origin" in request.headers:
            response.headers.update(self._guard.cors_headers(request))
        record = request.get(ACCESS_RECORD)
        response.headers["X-Request-Id"] = record.request_id if record else new_request_id()

    async def _served(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Serve one request; whatever goes wrong before the answer begins is a ProxyError."""
        if is_preflight(request):
            return preflight_response(request)
        if self._server_state.is_draining:
            raise Draining("the server is stopping; retry later")
        with self._entered(request):
            return await _handled(request, handler)

    def _entered(self, request: web.Request) -> AbstractContextManager[None]:
        """Find out who asks, and count it for as long as it is served."""
        is_open = request.path in OPEN_PATHS
        try:
            key = self._keyring.key_of(request)
        except Unauthorized:
            if not is_open:
                raise
            return nullcontext()
        self._connections.begin(request.protocol)
        if key is None:
            return nullcontext()
        request[KEY] = key
        return nullcontext() if is_open else self._limits.holding(key)


def new_request_id() -> str:
    """Return a name for a request that came without one."""
    return f"req_{os.urandom(12).hex()}"


async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ProxyError:
        raise
    except web.HTTPNotFound as error:
        raise NotFound("nothing is served at this path; see /v1/models") from error
    except web.HTTPMethodNotAllowed as error:
        allowed = sorted(error.allowed_methods)
        raise MethodNotAllowed(request.method, request.path, allowed) from error
    except Exception as error:
        _log.exception("request %s met a fault of the proxy", request[ACCESS_RECORD].request_id)
        if request[ACCESS_RECORD].status is not None:
            if request.transport is not None:
                request.transport.abort()  # the answer has begun: nobody takes it for complete
            raise
        raise InternalError from error


def _request_id(request: web.Request) -> str:
    """Return the client's own name of the request if it is fit for a log, else a new one."""
    given = request.headers.get("X-Request-Id")
    return given if given and _REQUEST_ID.fullmatch(given) else new_request_id()


def _say(response: web.Response, path: str, error: ProxyError) -> None:
    """Put an error into an answer that aiohttp has made."""
    response.body = body = orjson.dumps(error_body(path, error))
    response.content_type = "application/json"
    # By now aiohttp has said both for its own text.
    response.headers.update({"Content-Length": str(len(body)), "Connection": "close"})
    response.force_close()
