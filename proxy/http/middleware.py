"""What every request passes before its handler, and every response before it is sent.

In: the request gets its id; host, origin and key are checked; a draining server rejects it.
Out: an error becomes a response that client libraries understand, and the access log gets one line.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from aiohttp import HttpVersion11, web

from proxy.auth.access import API, CHAT, PREFIX, SIGNED_IN, UNCOUNTED, WITH_PARTS, Access
from proxy.auth.api_keys import KEY
from proxy.auth.key_limits import Admission
from proxy.auth.keys_file import read_keys
from proxy.auth.origin import OriginPolicy, is_preflight, preflight_response
from proxy.common.headers import DRAINING, HOP, PRIVATE, PROCESS, RESPONSE_HEADERS, SERVER
from proxy.errors import Draining, ExpectationFailed, InternalError, ProxyError, Unauthorized
from proxy.http.connections import Connections
from proxy.http.error_responses import error_response
from proxy.http.routes import Routes
from proxy.http.tls import server_context
from proxy.observe.in_flight import ServerState
from proxy.observe.record import (
    CLIENT_GONE,
    AccessRecord,
    Emit,
    RequestTrace,
    Tracer,
    new_request_id,
)
from proxy.observe.timeline import Timeline
from proxy.observe.tracing import check_tracing
from proxy.settings import ProxySettings

ACCESS_RECORD: Final = web.RequestKey("record", AccessRecord)

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_UNLIMITED: Final = nullcontext()
_log: Final = logging.getLogger(__name__)


def check(settings: ProxySettings) -> None:
    """Check hosts, origins, keys, certificates and traces without building a proxy.

    Raises:
        ConfigError: One of them is invalid.
    """
    OriginPolicy(settings)
    if settings.api_keys_file is not None:
        read_keys(settings.api_keys_file)
    if settings.tls is not None:
        server_context(settings.tls)
    check_tracing(settings.tracing)


class RequestMiddleware:
    """Handles all requests of a server. Raises ConfigError if an origin or a host is invalid."""

    def __init__(  # noqa: PLR0913, PLR0917 (each is a part of the server)
        self,
        settings: ProxySettings,
        routes: Routes,
        server_state: ServerState,
        emit: Emit,
        connections: Connections[Hashable],
        access: Access,
        admission: Admission,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        self._connections = connections
        self._origins = OriginPolicy(settings)
        self._access = access
        self._keys = access.keys
        self._admission = admission
        self._routes = routes
        self._server_state = server_state
        self._emit = emit
        self._tracer = tracer

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        record = AccessRecord(_request_id(request), Timeline())
        if self._tracer:
            record.trace = self._tracer.begin(request)
        request[ACCESS_RECORD], request[KEY] = record, None
        request[SIGNED_IN] = None
        headers = self._headers(request, record)
        request[RESPONSE_HEADERS] = headers
        rejected_by: ProxyError | None = None
        try:
            self._origins.check(request)
            response = await self._respond(request)
        except ProxyError as error:
            rejected_by = error
            record.fail(error)
            response = error_response(request.path, error)
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        finally:
            emit = _trace_emit(record.trace, self._emit) if record.trace else self._emit
            record.emit(emit, rejected_by)
        if not response.prepared:
            response.headers.update(headers)
        return response

    def _headers(self, request: web.BaseRequest, record: AccessRecord) -> dict[str, str]:
        headers = {"Server": SERVER, "X-Request-Id": record.request_id}
        if "Origin" in request.headers:
            headers.update(self._origins.cors_headers(request))
        if self._connections.is_closing:
            headers["Connection"] = "close"
        if request.path.startswith(API):
            headers |= PRIVATE
        if HOP in request.headers:
            headers[PROCESS] = self._server_state.process
        if self._server_state.is_draining:
            headers[DRAINING] = "1"
        return headers

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if is_preflight(request):
            return preflight_response(request)
        if self._server_state.is_draining:
            raise Draining("the server is stopping; retry later")
        with self._authorized(request):
            handler = self._routes.find(request)
            if "Expect" in request.headers:
                await _continue(request)
            try:
                return await handler(request)
            except ProxyError:
                raise
            except Exception as error:
                record = request[ACCESS_RECORD]
                _log.exception("internal error in request %s", record.request_id)
                if record.status is not None:
                    if request.transport is not None:
                        request.transport.abort()  # part of the response is sent
                    raise
                raise InternalError from error

    def _authorized(self, request: web.BaseRequest) -> AbstractContextManager[None]:
        """Check the key of a request; the returned context counts it against the key's limits."""
        try:
            source = self._access if request.path.startswith(PREFIX) else self._keys
            key = request[KEY] = source.key_of(request)
        except Unauthorized:
            if not self._access.is_open(request):
                raise
            return _UNLIMITED
        self._connections.begin(request.protocol)
        if key is None:
            return _UNLIMITED
        request[RESPONSE_HEADERS].update(self._admission.headers(key))
        is_counted = request.path == CHAT or request[SIGNED_IN] is None
        if request.path in UNCOUNTED or not is_counted:
            return _UNLIMITED
        return self._admission.request(key, has_parts=request.path in WITH_PARTS)


async def _continue(request: web.BaseRequest) -> None:
    """Ask the client to send the body. Source: RFC 9110, section 10.1.1.

    Raises:
        ConnectionError: The client has disconnected.
        ExpectationFailed: It expects something else.
    """
    if request.version != HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise ExpectationFailed
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the response is sent


def _trace_emit(trace: RequestTrace, emit: Emit) -> Emit:
    """Emit the last event of a request, and end its trace with it."""

    def emit_both(name: str, /, **fields: object) -> None:
        emit(name, **fields)
        trace.end(name, fields)

    return emit_both


def _request_id(request: web.BaseRequest) -> str:
    """The client's own request id if it is safe to log, else a new one."""
    given = request.headers.get("X-Request-Id")
    return given if given and _REQUEST_ID.fullmatch(given) else new_request_id()
