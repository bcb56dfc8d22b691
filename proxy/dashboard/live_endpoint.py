"""`/corral/v1/live`: the state and what changes in it, events, and the lines of a log.

A listener that reads slowly gets the difference to what it has, never a queue of states.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.auth.access import check_admin
from proxy.dashboard.host import DashboardHost
from proxy.dashboard.live_state import TICK_S, LiveState
from proxy.dashboard.log_lines import LINES_MAX, LogLines
from proxy.errors import BadRequest, Draining, TooManyRequests
from proxy.headers import EVENT_STREAM, RESPONSE_HEADERS
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.routes import Routes

_PATH: Final = "/corral/v1/live"
_LISTENERS_MAX: Final = 32
_LINES: Final = 200
_PING_S: Final = 15.0
_CHECK_S: Final = 1.0
_PING: Final = b":\n\n"
_HEADERS: Final = MappingProxyType({"Content-Type": EVENT_STREAM, "X-Accel-Buffering": "no"})


class LiveEndpoint:
    """`is_admin`: whether a request's session or key is still valid."""

    def __init__(
        self,
        live: LiveState,
        host: DashboardHost,
        server_state: ServerState,
        is_admin: Callable[[web.BaseRequest], bool],
    ) -> None:
        self._live = live
        self._host = host
        self._server_state = server_state
        self._is_admin = is_admin
        self._listeners = 0

    def add_routes(self, routes: Routes) -> None:
        routes.add(_PATH, get=self.listen)

    async def listen(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send changes until the client disconnects, its session ends or the server stops.

        Raises:
            SessionRequired, Forbidden: It is not an admin's.
            BadRequest: The number of lines is not one.
            NotFound: There is no such log.
            TooManyRequests: There are too many listeners.
        """
        check_admin(request)
        if self._listeners >= _LISTENERS_MAX:
            raise TooManyRequests(f"{self._listeners} pages are open; close one")
        own = request[RESPONSE_HEADERS]
        response = web.StreamResponse(headers={**_HEADERS, **own})
        self._listeners += 1
        try:
            async with self._log(request) as log:
                with suppress(ConnectionError):  # the client's
                    await self._serve(request, response, log)
        finally:
            self._listeners -= 1
        return response

    async def _serve(
        self, request: web.BaseRequest, response: web.StreamResponse, log: LogLines | None
    ) -> None:
        reason = "stopping"
        with suppress(Draining), InFlightRequest(self._server_state.watching):
            await response.prepare(request)
            await self._send(request, response, log)
            reason = "session"
        await response.write(_event("end", {"reason": reason}))
        await response.write_eof()

    async def _send(
        self, request: web.BaseRequest, response: web.StreamResponse, log: LogLines | None
    ) -> None:
        """Send until the session ends."""
        state, first = self._live.snapshot()
        await response.write(_event("snapshot", first))
        seq, now_s = 0, self._live.now_s
        sent_at_s = checked_at_s = now_s
        while True:
            before, state = state, self._live.state()
            text = self._changes(before, state) + self._events(seq) + _lines(log)
            seq, now_s = self._live.events.last_seq, self._live.now_s
            if text or now_s - sent_at_s >= _PING_S:
                sent_at_s = now_s
                await response.write(text or _PING)
            if now_s - checked_at_s >= _CHECK_S:
                checked_at_s = now_s
                if not self._is_admin(request):
                    return
            await asyncio.sleep(TICK_S)

    def _changes(self, before: dict[str, Any], after: dict[str, Any]) -> bytes:
        patch = self._live.patch(before, after) if before is not after else {}
        return _event("patch", patch) if patch else b""

    def _events(self, seq: int) -> bytes:
        if self._live.events.last_seq == seq:
            return b""
        return b"".join(_event("event", one) for one in self._live.events.after(seq))

    @asynccontextmanager
    async def _log(self, request: web.BaseRequest) -> AsyncIterator[LogLines | None]:
        """Read the log that the request names, for the length of the block."""
        if (source := request.query.get("logs")) is None:
            yield None
            return
        lines = self._host.log_lines(source, lines_of(request, _LINES))
        log = LogLines(source)
        async with aclosing(lines), asyncio.TaskGroup() as group:
            reading = group.create_task(log.read(lines))
            yield log
            reading.cancel()


def lines_of(request: web.BaseRequest, default: int) -> int:
    """How many lines the query asks for; raises BadRequest."""
    given = request.query.get("lines", str(default))
    if not given.isascii() or not given.isdigit() or int(given[:9]) > LINES_MAX:
        raise BadRequest(f"lines must be a number up to {LINES_MAX}")
    return int(given)


def _lines(log: LogLines | None) -> bytes:
    found = log.take() if log else None
    return _event("log", found) if found else b""


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data, default=str))
