"""`/corral/v1/live`: the state and its changes, events, and the lines of a log.

The state is built at most four times a second, and only for listeners. A slow listener gets the
difference to its last state, never a queue of states. The daemon's latest events are numbered; a
listener gets the events and log lines that are new to it, both bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final

import orjson
from aiohttp import web
from attrs import define, field

from proxy.auth.access import check_admin
from proxy.common.headers import EVENT_STREAM, RESPONSE_HEADERS
from proxy.dashboard.host import DashboardHost, HostEvent
from proxy.dashboard.state import (
    Observed,
    Rates,
    State,
    Totals,
    caches_of,
    merge_patch,
    state_of,
    with_running,
)
from proxy.endpoints.feature import Core, Feature
from proxy.endpoints.requests import Requests
from proxy.errors import BadRequest, Draining, TooManyRequests
from proxy.http.middleware import Routes
from proxy.observe.cache_finding import Tier
from proxy.observe.record import InFlightRequest

_KEPT: Final = 100
# Already part of the state.
_LEFT_OUT: Final = frozenset({"instance.load_progress"})


class EventHistory:
    """The latest events; those of requests, which are many, displace no others."""

    def __init__(self) -> None:
        self.last_seq = 0
        self._requests = deque[tuple[int, HostEvent]](maxlen=_KEPT)
        self._others = deque[tuple[int, HostEvent]](maxlen=_KEPT)

    def add(self, event: HostEvent) -> None:
        if event.name not in _LEFT_OUT:
            self.last_seq += 1
            kept = self._requests if event.name.startswith("request.") else self._others
            kept.append((self.last_seq, event))

    def after(self, seq: int) -> list[dict[str, Any]]:
        new = [kept for kept in (*self._requests, *self._others) if kept[0] > seq]
        return [_event_members(number, event) for number, event in sorted(new, key=itemgetter(0))]


def _event_members(seq: int, event: HostEvent) -> dict[str, Any]:
    fields: Mapping[str, object] = event.fields
    return {
        "seq": seq,
        "at": event.at.isoformat(timespec="milliseconds"),
        "name": event.name,
        "level": event.level,
        "fields": {name: value for name, value in fields.items() if value is not None},
    }


LINES_MAX: Final = 2000
_SIZE_MAX: Final = 1024**2  # characters
_TOGETHER_MAX: Final = 500


class LogLines:
    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: deque[str] = deque()
        self._size = 0  # characters
        self._dropped = 0

    async def read(self, lines: AsyncIterable[str]) -> None:
        """Add all lines until the file can no longer be read."""
        count = 0
        with suppress(OSError):
            async for line in lines:
                self.add(line)
                count += 1
                if count % _TOGETHER_MAX == 0:
                    await asyncio.sleep(0)  # a flood of lines lets others run

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._size += len(line)
        while len(self._lines) > LINES_MAX or self._size > _SIZE_MAX:
            self._size -= len(self._lines.popleft())
            self._dropped += 1

    def take(self) -> dict[str, Any] | None:
        """Return new `lines` and the number `dropped` before them; None if there are none."""
        if not self._lines:
            return None
        found: dict[str, Any] = {"source": self._source, "lines": list(self._lines)}
        if self._dropped:
            found["dropped"] = self._dropped
        self._lines.clear()
        self._size = self._dropped = 0
        return found


TICK_S: Final = 0.25
_CACHES: Final[Mapping[str, str]] = {
    "expected_tokens": "expected_cached_tokens",
    "expected_tokens_found": "expected_tokens_found",
}


@define(eq=False, slots=False)
class LiveState:
    _host: DashboardHost
    _core: Core
    _requests: Requests
    _clock: Callable[[], float] = time.monotonic
    events: EventHistory = field(factory=EventHistory, init=False)
    _rates: Rates = field(factory=Rates, init=False)
    _state: State = field(factory=dict, init=False)
    _made_at_s: float = field(default=float("-inf"), init=False)
    _last_patch: tuple[State, State, dict[str, Any]] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._server = {"version": self._host.version, "has_keys": self._core.keys.are_needed}
        self._started_at_s = self._clock()
        self._host.observe(self.events.add)

    @property
    def now_s(self) -> float:
        return self._clock() - self._started_at_s

    def sample(self) -> None:
        queues = self._core.router.queues.stats().values()
        queued = sum(queue.interactive + queue.batch for queue in queues)
        totals = with_running(self._ended_totals(), self._core.router.instances())
        self._rates.add(totals, queued, self.now_s)

    def snapshot(self) -> tuple[State, dict[str, Any]]:
        """Return the state, and the first message of a listener."""
        state = self.state()
        first = {"now_s": round(self.now_s, 3), "state": state, "history": self._rates.history()}
        return state, first

    def state(self) -> State:
        """Return the current state; it is never changed, only replaced."""
        now_s = self._clock()
        if now_s - self._made_at_s >= TICK_S / 2:
            self._made_at_s = now_s
            self._state = state_of(self._observe(now_s))
        return self._state

    def patch(self, before: State, after: State) -> dict[str, Any]:
        """Return the merge patch between two states; listeners with the same states share it."""
        if self._last_patch and self._last_patch[0] is before and self._last_patch[1] is after:
            return self._last_patch[2]
        patch = merge_patch(before, after)
        self._last_patch = (before, after, patch)
        return patch

    def _observe(self, now_s: float) -> Observed:
        host, core = self._host, self._core
        uses = core.router.cache_use.models
        tiers = {
            f"{'computed' if tier is Tier.NONE else tier}_tokens": [
                (model, used[tier].tokens) for model, used in uses.items()
            ]
            for tier in Tier
        }
        saved = [(model, sum(use.saved_s for use in used.values())) for model, used in uses.items()]
        phase = "stopping" if core.server_state.is_draining else "serving"
        return Observed(
            now_s,
            self._started_at_s,
            {**self._server, "url": core.server_state.url, "state": phase},
            core.loader.models(),
            host.models(),
            host.instances(),
            core.router.instances(),
            core.router.queues.stats(),
            self._requests.stats(),
            host.nodes(),
            host.memory(),
            host.devices(),
            self._rates.latest(),
            caches_of(
                {name: self._by_model(counter) for name, counter in _CACHES.items()}
                | tiers
                | {"saved_s": saved}
            ),
        )

    def _ended_totals(self) -> Totals:
        counts = self._core.metrics.counts
        first_tokens, first_tokens_s = 0, 0.0
        for histogram in self._core.metrics.histograms("time_to_first_token_seconds"):
            first_tokens += sum(histogram.counts)
            first_tokens_s += histogram.total
        return Totals(
            sum(counts("decoded_tokens").values()),
            sum(counts("prompt_tokens").values()),
            first_tokens,
            first_tokens_s,
        )

    def _by_model(self, counter: str) -> Iterator[tuple[str, float]]:
        sums: dict[str, float] = defaultdict(float)
        for (model, *_), count in self._core.metrics.counts(counter).items():
            sums[model] += count
        yield from sums.items()


_PATH: Final = "/corral/v1/live"
_LINES: Final = 200
_PING_S: Final = 15.0
_CHECK_S: Final = 1.0
_PING: Final = b":\n\n"
_HEADERS: Final = MappingProxyType({"Content-Type": EVENT_STREAM, "X-Accel-Buffering": "no"})


@define(eq=False, slots=False)
class LiveEndpoint(Feature):
    """The endpoint; `is_admin` returns whether a request's session or key is still valid."""

    _live: LiveState
    _host: DashboardHost
    _core: Core
    _is_admin: Callable[[web.BaseRequest], bool]
    _listeners: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._server_state = self._core.server_state

    def add_routes(self, routes: Routes) -> None:
        routes.add(_PATH, get=self.listen)

    async def listen(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send changes until the client disconnects, its session ends or the server stops.

        Raises:
            SessionRequired, Forbidden: The request is not an admin's.
            BadRequest: The number of lines is invalid.
            NotFound: There is no such log.
            TooManyRequests: There are too many listeners.
        """
        check_admin(request)
        if self._listeners >= 32:
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
        state, first = self._live.snapshot()
        await response.write(_event("snapshot", first))
        seq, now_s = 0, self._live.now_s
        sent_at_s = checked_at_s = now_s
        while True:
            before, state = state, self._live.state()
            patch = self._live.patch(before, state) if before is not state else {}
            changes = _event("patch", patch) if patch else b""
            text = changes + self._events(seq) + _lines(log)
            seq, now_s = self._live.events.last_seq, self._live.now_s
            if text or now_s - sent_at_s >= _PING_S:
                sent_at_s = now_s
                await response.write(text or _PING)
            if now_s - checked_at_s >= _CHECK_S:
                checked_at_s = now_s
                if not self._is_admin(request):
                    return
            await asyncio.sleep(TICK_S)

    def _events(self, seq: int) -> bytes:
        if self._live.events.last_seq == seq:
            return b""
        return b"".join(_event("event", event) for event in self._live.events.after(seq))

    @asynccontextmanager
    async def _log(self, request: web.BaseRequest) -> AsyncIterator[LogLines | None]:
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
    """Return the number of lines in the query; raise BadRequest if it is invalid."""
    given = request.query.get("lines", str(default))
    if not given.isascii() or not given.isdigit() or int(given[:9]) > LINES_MAX:
        raise BadRequest(f"lines must be a number up to {LINES_MAX}")
    return int(given)


def _lines(log: LogLines | None) -> bytes:
    found = log.take() if log else None
    return _event("log", found) if found else b""


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data, default=str))
