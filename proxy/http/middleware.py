"""Checks each request, finds its handler, and turns errors into responses.

Before the handler, `RequestMiddleware` assigns the request's id, checks host, origin and key, and
rejects the request if the server is draining. After it, an error becomes a response that client
libraries understand, and the access log gets one line. `Routes` finds the handler of a path and
method.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import orjson
from aiohttp import HttpVersion11, web
from attrs import define

from proxy.auth.access import (
    API,
    CHAT,
    MODELS,
    PREFIX,
    SIGNED_IN,
    SLOT_FILES,
    UNCOUNTED,
    WITH_PARTS,
    Access,
    OriginPolicy,
    preflight_response,
)
from proxy.auth.api_keys import KEY, Admission
from proxy.auth.keys_file import read_keys
from proxy.common.headers import DRAINING, HOP, PRIVATE, PROCESS, RESPONSE_HEADERS, SERVER
from proxy.errors import (
    ConfigError,
    Draining,
    ExpectationFailed,
    InternalError,
    MethodNotAllowed,
    NotFound,
    ProxyError,
    Unauthorized,
)
from proxy.http.api_formats import error_response
from proxy.http.connections import Connections
from proxy.http.tls import server_context
from proxy.observe.record import (
    CLIENT_GONE,
    AccessRecord,
    Report,
    ServerState,
    Timeline,
    Tracer,
    new_request_id,
)
from proxy.observe.tracing import check_tracing
from proxy.settings import ProxySettings

ACCESS_RECORD: Final = web.RequestKey("record", AccessRecord)

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PREFLIGHT: Final = "Access-Control-Request-Method"
_UNLIMITED: Final = nullcontext()
_log: Final = logging.getLogger(__name__)


def json_response(content: object) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

# The text that `{id}` stands for in the path of a request.
PATH_ID: Final = web.RequestKey("path_id", str)

_ID: Final = "{id}"


class Routes:
    """Finds handlers; requests that match no route here are looked up in `beneath`."""

    def __init__(self, beneath: Routes | None = None) -> None:
        self._beneath = beneath
        self._exact: dict[str, dict[str, Handler]] = {}
        self._with_id: list[tuple[str, str, dict[str, Handler]]] = []

    def add(
        self,
        path: str,
        *,
        get: Handler | None = None,
        post: Handler | None = None,
        delete: Handler | None = None,
    ) -> None:
        """Route a path; if several paths with `{id}` match a request, the first one added counts.

        `{id}` in the path stands for any text, slashes included; `get` also answers HEAD.
        """
        given = {"GET": get, "HEAD": get, "POST": post, "DELETE": delete}
        handlers = {method: handler for method, handler in given.items() if handler}
        prefix, is_open, suffix = path.partition(_ID)
        if is_open:
            self._with_id.append((prefix, suffix, handlers))
        else:
            self._exact.setdefault(path, {}).update(handlers)

    def find(self, request: web.BaseRequest) -> Handler:
        """Return the handler of a request. Raises NotFound, MethodNotAllowed."""
        path = request.rel_url.path_safe  # decoded, except %2F and %25
        handlers = self._exact.get(path) or self._find_with_id(request, path)
        if handler := handlers.get(request.method):
            return handler
        if not handlers and self._beneath:
            return self._beneath.find(request)
        if not handlers:
            raise NotFound("no such endpoint; GET /v1/models lists the models")
        raise MethodNotAllowed(request.method, request.path, sorted(handlers))

    def _find_with_id(self, request: web.BaseRequest, path: str) -> dict[str, Handler]:
        for prefix, suffix, handlers in self._with_id:
            is_longer = len(path) > len(prefix) + len(suffix)
            if is_longer and path.startswith(prefix) and path.endswith(suffix):
                encoded = path[len(prefix) : len(path) - len(suffix)]
                request[PATH_ID] = encoded.replace("%2F", "/").replace("%25", "%")
                return handlers
        return {}


def check(settings: ProxySettings) -> None:
    """Check hosts, origins, keys, certificates and traces in settings. Raises ConfigError."""
    OriginPolicy(settings)
    if settings.api_keys_file is not None:
        keys = {key.name for key in read_keys(settings.api_keys_file)[0]}
        for role in settings.auth_proxy.roles.values() if settings.auth_proxy else ():
            if role not in keys:
                reason = f"proxy.auth_proxy.roles: {settings.api_keys_file} has no [keys.{role}]"
                raise ConfigError(reason, f"corral key add {role}")
    if settings.tls is not None:
        server_context(settings.tls)
    check_tracing(settings.tracing)


@define(eq=False, slots=False)
class RequestMiddleware:
    """Handles all requests of a server. Raises ConfigError if an origin or a host is invalid."""

    _settings: ProxySettings
    _routes: Routes
    _server_state: ServerState
    _report: Report
    _connections: Connections[Hashable]
    _access: Access
    _admission: Admission
    _tracer: Tracer | None = None

    def __attrs_post_init__(self) -> None:
        self._origins = OriginPolicy(self._settings)
        self._keys = self._access.keys

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        fields = request.headers
        given = fields.get("X-Request-Id")
        is_safe = given and _REQUEST_ID.fullmatch(given)  # to log it
        record = AccessRecord(given if given and is_safe else new_request_id(), Timeline())
        record.trace = self._tracer.begin(request) if self._tracer else None
        request[ACCESS_RECORD] = record
        headers = request[RESPONSE_HEADERS] = self._headers(request, record)
        rejected_by: ProxyError | None = None
        try:
            is_known = fields.get("Host") in self._origins.accepted
            if not is_known or "Origin" in fields or "Sec-Fetch-Site" in fields:
                self._origins.check(request)
            if request.method == "OPTIONS" and _PREFLIGHT in fields:
                response: web.StreamResponse = preflight_response(request)
            elif self._server_state.is_draining and not _is_for_other_machine(request):
                raise Draining("the server is stopping; retry later")  # noqa: TRY301
            else:
                with self._authorize(request):
                    handler = self._routes.find(request)
                    if "Expect" in fields:
                        await _continue(request)
                    response = await handler(request)
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        except Exception as error:  # noqa: BLE001 (logged, and answered with 500)
            rejected_by = _error_of(request, record, error)
            record.fail(rejected_by)
            response = error_response(request.path, rejected_by)
        finally:
            record.emit(self._report, rejected_by)
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

    def _authorize(self, request: web.BaseRequest) -> AbstractContextManager[None]:
        """Check the key of a request; the returned context counts it towards the key's limits."""
        try:
            source = self._access if request.path.startswith(PREFIX) else self._keys
            key = request[KEY] = source.key_of(request)
        except Unauthorized:
            if not self._access.is_open(request):
                raise
            request[KEY] = None
            return _UNLIMITED
        self._connections.begin(request.protocol)
        if key is None:
            return _UNLIMITED
        if key.name in self._keys.limited:
            request[RESPONSE_HEADERS].update(self._admission.tokens.headers(key))
        if key.max_in_flight is None and key.requests_per_minute is None:
            return _UNLIMITED
        is_counted = request.path == CHAT or SIGNED_IN not in request
        is_poll = request.path == MODELS and HOP in request.headers
        is_poll = is_poll or request.path.startswith(SLOT_FILES)
        if request.path in UNCOUNTED or is_poll or not is_counted:
            return _UNLIMITED
        return self._admission.request(key, has_parts=request.path in WITH_PARTS)


def _is_for_other_machine(request: web.BaseRequest) -> bool:
    """Return whether another machine asks for conversations that this one leaves behind."""
    return request.method == "GET" and request.path.startswith(SLOT_FILES)


def _error_of(request: web.BaseRequest, record: AccessRecord, error: Exception) -> ProxyError:
    """Return the error for the client; raise an error that breaks off its response."""
    if isinstance(error, ProxyError):
        return error
    _log.error("internal error in request %s", record.request_id, exc_info=error)
    if record.status is not None:
        if request.transport is not None:
            request.transport.abort()  # part of the response is sent
        raise error
    return InternalError()


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
    request.writer.output_size = 0  # none of the response is sent yet
