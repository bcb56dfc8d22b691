"""The daemon's side of the control socket: JSON over HTTP on a unix socket of mode 0600.

    GET  /v1/status     status of the daemon, its models and instances
    GET  /v1/trials     {"trials": [...]}, the figures of each model's trial
    GET  /v1/canaries   {"running": [...], "ended": [...]}, the models' canaries
    GET  /v1/balance    {"balances": [...]}, the workers of each split model, and what to move
    GET  /v1/slots      a CachesStatus: where the prompts of each model are kept
    GET  /v1/requests   {"requests": [...]}, those in flight, oldest first
    POST /v1/requests/ID/cancel   end one with an error
    POST /v1/history    a HistoryQuery; {"requests": [...]}, those that ended, the latest first
    POST /v1/history/forget   {"model": name or null}; {"count": n}
    POST /v1/dashboard/link       {"url": …}, which signs one browser in
    GET  /v1/events     events, until the client disconnects
    POST /v1/start      {"models": [names]}; until each is ready or has failed
    POST /v1/stop       {"models": [names]}; until each has stopped
    POST /v1/restart    {"models": [names]}; until each is ready or has failed
    POST /v1/load       as start
    POST /v1/unload     {"models": [names]}; until each has stopped; the next request loads it
    POST /v1/reload     {"dry_run": bool}; until the settings are applied or rejected
    POST /v1/slots/save {"models": [names]}; until their idle slots are saved
    POST /v1/slots/forget   a ForgetRequest; a ForgottenSlots, once all is deleted
    POST /v1/models/NAME/warm   a chat request; until each instance has prefilled its prompt
    POST /v1/models/NAME/balance   {"undo": bool}; until its layers are moved as suggested, or back
    POST /v1/models/NAME/canary    {"engine", "share", "limit_s", "margin"}; until it serves
    POST /v1/models/NAME/canary/promote|withdraw    until that is done
    POST /v1/capture    {"model", "duration_s", "size_bytes", "requests"}; the lines of a capture
    POST /v1/capture/stop       end the capture that runs
    POST /v1/hosts      {}; be a desktop host until disconnect: first `host`, then events
    POST /v1/hosts/N/leave      leave, and keep the stream to its end
    POST /v1/shutdown   drain and stop; until no engine runs

All but GET of status, trials, slots, requests, canaries and balance, cancel, link, history, forget,
and those of captures are streams of supervisor.daemon.control_messages.StreamMessage. A client that
disconnects stops no command, but its capture.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard, TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from proxy.endpoints.requests import RequestStats
from proxy.observe.past import HistoryQuery, StoredRequest
from proxy.request.models import PrefillResult
from supervisor.daemon.control_messages import (
    BalanceStatus,
    CachesStatus,
    CanariesStatus,
    DaemonStatus,
    ForgetRequest,
    ForgottenSlots,
    JoinedHost,
    MovedLayers,
    StreamMessage,
    TrialStatus,
    daemon_exited,
    request_status,
)
from supervisor.daemon.desktop import DesktopHosts
from supervisor.daemon.model_commands import canary_request
from supervisor.daemon.model_status import reload_report, saved_slot, warmed_instance
from supervisor.engine import prompts
from supervisor.engine.prompts import WarmPrompt
from supervisor.errors import (
    CorralError,
    DaemonBusy,
    NoSuchConversation,
    NoSuchModel,
    NoSuchRequest,
    SettingsInvalid,
)
from supervisor.events import DAEMON_STOPPED, LOAD_PROGRESS, Event, EventStream, Listener
from supervisor.experiments.canary import CanaryRequest
from supervisor.experiments.capture_lines import (
    DURATION_MAX_S,
    SIZE_MAX_BYTES,
    SIZE_MIN_BYTES,
    CaptureLimits,
)
from supervisor.fleet.reload import ReloadResult
from supervisor.slot_store.manifest import Manifest


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    duration_s: float = Field(gt=0, le=DURATION_MAX_S)
    size_bytes: int = Field(ge=SIZE_MIN_BYTES, le=SIZE_MAX_BYTES)
    requests: int | None = Field(ge=1)


def capture_request(body: bytes) -> tuple[str, CaptureLimits]:
    """Return a model and the limits; raises SettingsInvalid."""
    try:
        found = _Body.model_validate_json(body)
    except ValidationError as error:
        raise SettingsInvalid(
            'the body must be {"model", "duration_s", "size_bytes", "requests": number or null}'
        ) from error
    return found.model, CaptureLimits(found.duration_s, found.size_bytes, found.requests)


_MEMBERS: Final = ("model", "conversation", "request")


def forget_request(body: bytes) -> ForgetRequest:
    """Read what to forget; raises SettingsInvalid."""
    try:
        members = orjson.loads(body)
        given = [members[name] for name in _MEMBERS]
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsInvalid(f"the body must have {', '.join(_MEMBERS)}") from error
    named = [value for value in given if value is not None]
    if len(named) > 1 or not all(isinstance(value, str) for value in named):
        raise SettingsInvalid("the body must name one of model, conversation and request, or none")
    model, conversation, request = given
    return {"model": model, "conversation": conversation, "request": request}


_QUERY: TypeAdapter[HistoryQuery] = TypeAdapter(HistoryQuery)


def history_query(body: bytes) -> HistoryQuery:
    """Read a query; raises SettingsInvalid."""
    try:
        return _QUERY.validate_json(body)
    except ValidationError as error:
        raise SettingsInvalid("the body must be a query for requests") from error


_WAITING_EVERY_S: Final = 5.0
_BODY_MAX_BYTES: Final = 2 * prompts.SIZE_MAX_BYTES

Value = TypeVar("Value")


class Service(Protocol):
    """The daemon. Model names that are not configured raise NoSuchModel.

    Methods that return a future raise DaemonBusy while the daemon stops, and a stop cancels it.
    """

    def status(self) -> DaemonStatus: ...

    def trials(self) -> list[TrialStatus]: ...

    async def caches(self) -> CachesStatus:
        """Return where the prompts of each model are kept."""

    def requests(self) -> list[RequestStats]: ...

    async def past_requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """Return requests that have ended, the latest first; raises HistoryUnavailable."""

    async def forget_requests(self, model: str | None) -> int:
        """Delete what is stored of a model's requests, or of all; return of how many."""

    def cancel_request(self, request_id: str) -> None:
        """End a request with an error; raises NoSuchRequest where none in flight has the id."""

    def dashboard_link(self) -> str:
        """Return a link that signs one browser in; raises SettingsInvalid without a dashboard."""

    def capture(
        self, model: str, limits: CaptureLimits
    ) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]]:
        """Capture requests for the block, which reads the lines; DaemonBusy if a capture runs."""

    def stop_capture(self) -> None:
        """End the capture that runs, if one does."""

    def balances(self) -> list[BalanceStatus]: ...

    def balance(self, model: str, *, undo: bool) -> asyncio.Future[MovedLayers | CorralError]:
        """Begin to move the layers of a model as suggested, or back."""

    def canaries(self) -> CanariesStatus: ...

    def start_canary(self, request: CanaryRequest) -> asyncio.Future[CorralError | None]:
        """Begin to start a canary."""

    def end_canary(self, model: str, *, is_promoted: bool) -> asyncio.Future[CorralError | None]:
        """Begin to promote or to withdraw the canary of a model."""

    async def refresh(self) -> None:
        """Update the figures of `status`, `trials` and `canaries`, in a fraction of a second."""

    def command(self, verb: str, models: Sequence[str]) -> Callable[[], bool]:
        """Begin a command on models; return a test for its end."""

    def reload(self, *, dry_run: bool) -> asyncio.Future[ReloadResult | CorralError]:
        """Begin to reload; emits an event at the end unless `dry_run`. DaemonBusy if one runs."""

    def add_models(
        self, tables: Mapping[str, object]
    ) -> asyncio.Future[ReloadResult | CorralError]:
        """Begin to serve further models, each by `[models.NAME]`; raises SettingsInvalid."""

    def save_slots(self, models: Sequence[str]) -> asyncio.Future[list[Manifest]]:
        """Begin to save idle slots; the result is everything that is saved then."""

    def forget_slots(self, asked: ForgetRequest) -> asyncio.Future[ForgottenSlots | CorralError]:
        """Begin to forget conversations."""

    def warm(
        self, model: str, prompt: WarmPrompt
    ) -> asyncio.Future[list[PrefillResult] | CorralError]:
        """Begin to prefill a prompt on every instance."""

    @property
    def hosts(self) -> DesktopHosts | None:
        """The desktop hosts; None for a daemon that ends by command only."""

    def joined_host(self, host: int) -> JoinedHost: ...

    def shutdown(self, reason: str) -> None:
        """Begin to drain and stop; a repeated call shortens the drain."""


@asynccontextmanager
async def serve(service: Service, events: EventStream, path: Path) -> AsyncIterator[None]:
    app = web.Application(client_max_size=_BODY_MAX_BYTES, middlewares=[_errors_as_json])
    api = _Api(service, events)
    app.add_routes(
        [
            web.get("/v1/status", api.status),
            web.get("/v1/trials", api.trials),
            web.get("/v1/slots", api.caches),
            web.get("/v1/requests", api.requests),
            web.post("/v1/requests/{id}/cancel", api.cancel_request),
            web.post("/v1/history", api.past_requests),
            web.post("/v1/history/forget", api.forget_requests),
            web.post("/v1/dashboard/link", api.dashboard_link),
            web.get("/v1/canaries", api.canaries),
            web.get("/v1/balance", api.balances),
            web.get("/v1/events", api.events),
            web.post("/v1/{verb:start|stop|restart|load|unload}", api.command),
            web.post("/v1/reload", api.reload),
            web.post("/v1/models", api.add_models),
            web.post("/v1/slots/save", api.save_slots),
            web.post("/v1/slots/forget", api.forget_slots),
            web.post("/v1/models/{model}/warm", api.warm),
            web.post("/v1/models/{model}/balance", api.balance),
            web.post("/v1/models/{model}/canary", api.start_canary),
            web.post("/v1/models/{model}/canary/{verb:promote|withdraw}", api.end_canary),
            web.post("/v1/capture", api.capture),
            web.post("/v1/capture/stop", api.stop_capture),
            web.post("/v1/hosts", api.host),
            web.post(r"/v1/hosts/{host:\d{1,9}}/leave", api.leave),
            web.post("/v1/shutdown", api.shutdown),
        ]
    )
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    path.unlink(missing_ok=True)
    await web.UnixSite(runner, str(path)).start()
    path.chmod(0o600)
    try:
        yield
    finally:
        await runner.cleanup()
        path.unlink(missing_ok=True)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except CorralError as error:
        is_unknown = isinstance(error, NoSuchModel | NoSuchRequest | NoSuchConversation)
        status = HTTPStatus.NOT_FOUND if is_unknown else HTTPStatus.CONFLICT
        return _json({"error": error.as_json()}, status)


def _json(content: object, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


class _Api:
    def __init__(self, service: Service, events: EventStream) -> None:
        self._service = service
        self._events = events

    async def status(self, _: web.Request) -> web.StreamResponse:
        await self._service.refresh()
        return _json(self._service.status())

    async def trials(self, _: web.Request) -> web.StreamResponse:
        await self._service.refresh()
        return _json({"trials": self._service.trials()})

    async def canaries(self, _: web.Request) -> web.StreamResponse:
        await self._service.refresh()
        return _json(self._service.canaries())

    async def start_canary(self, request: web.Request) -> web.StreamResponse:
        wanted = canary_request(request.match_info["model"], await request.read())
        with self._events.listen() as listener:
            task = self._service.start_canary(wanted)
            return await self._send_canaries(request, listener, task)

    async def end_canary(self, request: web.Request) -> web.StreamResponse:
        model, is_promoted = request.match_info["model"], request.match_info["verb"] == "promote"
        with self._events.listen() as listener:
            task = self._service.end_canary(model, is_promoted=is_promoted)
            return await self._send_canaries(request, listener, task)

    async def _send_canaries(
        self,
        request: web.Request,
        listener: Listener,
        task: asyncio.Future[CorralError | None],
    ) -> web.StreamResponse:
        def done(_: None) -> StreamMessage:
            return {"canaries": self._service.canaries()}

        return await _send(request, _events(listener, task.done), lambda: _last_message(task, done))

    async def caches(self, _: web.Request) -> web.StreamResponse:
        return _json(await self._service.caches())

    async def requests(self, _: web.Request) -> web.StreamResponse:
        return _json(
            {"requests": [request_status(request) for request in self._service.requests()]}
        )

    async def past_requests(self, request: web.Request) -> web.StreamResponse:
        query = history_query(await request.read())
        return _json({"requests": await self._service.past_requests(query)})

    async def forget_requests(self, request: web.Request) -> web.StreamResponse:
        model = await _member(request, "model", _is_name_or_none, '{"model": name or null}')
        return _json({"count": await self._service.forget_requests(model)})

    async def cancel_request(self, request: web.Request) -> web.StreamResponse:
        self._service.cancel_request(request.match_info["id"])
        return _json({})

    async def dashboard_link(self, _: web.Request) -> web.StreamResponse:
        return _json({"url": self._service.dashboard_link()})

    async def capture(self, request: web.Request) -> web.StreamResponse:
        # Imported here: most daemons need no memory for it.

        model, limits = capture_request(await request.read())
        async with self._service.capture(model, limits) as lines:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            async for line in lines:
                await response.write(line)
            return response

    async def stop_capture(self, _: web.Request) -> web.StreamResponse:
        self._service.stop_capture()
        return _json({})

    async def balances(self, _: web.Request) -> web.StreamResponse:
        return _json({"balances": self._service.balances()})

    async def balance(self, request: web.Request) -> web.StreamResponse:
        undo = await _member(request, "undo", _is_bool, '{"undo": true or false}')
        task = self._service.balance(request.match_info["model"], undo=undo)
        return await _send(request, _pauses(task), lambda: _last_message(task, _moved_message))

    async def events(self, request: web.Request) -> web.StreamResponse:
        with self._events.listen() as listener:
            return await _send(request, _events(listener, lambda: False, _event_line), self._done)

    async def command(self, request: web.Request) -> web.StreamResponse:
        models = await _models(request)
        with self._events.listen() as listener:
            is_over = self._service.command(request.match_info["verb"], models)
            return await _send(request, _events(listener, is_over), self._done)

    async def reload(self, request: web.Request) -> web.StreamResponse:
        dry_run = await _member(request, "dry_run", _is_bool, '{"dry_run": true or false}')
        with self._events.listen() as listener:
            task = self._service.reload(dry_run=dry_run)
            if dry_run:
                await asyncio.wait([task])
            return await _send(
                request,
                _events(listener, task.done),
                lambda: _last_message(task, _reloaded_message),
            )

    async def add_models(self, request: web.Request) -> web.StreamResponse:
        tables = await _member(request, "models", _is_table, '{"models": {name: table}}')
        task = self._service.add_models(tables)
        return await _send(request, _pauses(task), lambda: _last_message(task, _reloaded_message))

    async def save_slots(self, request: web.Request) -> web.StreamResponse:
        task = self._service.save_slots(await _models(request))
        return await _send(request, _pauses(task), lambda: _last_message(task, _saved_message))

    async def forget_slots(self, request: web.Request) -> web.StreamResponse:
        task = self._service.forget_slots(forget_request(await request.read()))
        await asyncio.wait([task])
        outcome = daemon_exited() if task.cancelled() else task.result()
        if isinstance(outcome, CorralError):
            raise outcome
        return _json(outcome)

    async def warm(self, request: web.Request) -> web.StreamResponse:
        model = request.match_info["model"]
        task = self._service.warm(model, await _prompt(request, model))
        return await _send(request, _pauses(task), lambda: _last_message(task, _warmed_message))

    async def host(self, request: web.Request) -> web.StreamResponse:
        hosts = self._hosts()
        with self._events.listen() as listener, hosts.joined() as host:

            def is_over() -> bool:  # the last one stays to the end of the daemon
                return not (hosts.has(host) or hosts.is_empty)

            events = _events(listener, is_over, _event_line)
            return await _send(
                request, _first({"host": self._service.joined_host(host)}, events), self._done
            )

    async def leave(self, request: web.Request) -> web.StreamResponse:
        self._hosts().leave(int(request.match_info["host"]))
        return _json({})

    def _hosts(self) -> DesktopHosts:
        if (hosts := self._service.hosts) is not None:
            return hosts
        raise DaemonBusy(
            "the daemon that runs in this runtime directory is not a desktop backend",
            hint="corral stop ends it; or set CORRAL_RUNTIME_DIR to a directory of the application",
        )

    async def shutdown(self, request: web.Request) -> web.StreamResponse:
        with self._events.listen() as listener:
            self._service.shutdown("requested over the control socket")
            return await _send(request, _events(listener, lambda: False), self._done)

    def _done(self) -> StreamMessage:
        return {"done": self._service.status()}


async def _send(
    request: web.Request,
    messages: AsyncIterator[StreamMessage],
    last_message: Callable[[], StreamMessage],
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    async for message in messages:
        await response.write(orjson.dumps(message) + b"\n")
    await response.write(orjson.dumps(last_message()) + b"\n")
    return response


def _event_line(event: Event) -> StreamMessage:
    return {
        "event": {
            "name": event.name,
            "level": event.level,
            "at": event.at.isoformat(),
            "fields": dict(event.fields),
        }
    }


def _progress_or_event(event: Event) -> StreamMessage:
    if event.name != LOAD_PROGRESS:
        return _event_line(event)
    instance, fraction = event.fields["instance"], event.fields["value"]
    return {"progress": {"instance": str(instance), "fraction": float(str(fraction))}}


async def _events(
    listener: Listener,
    is_over: Callable[[], bool],
    message_of: Callable[[Event], StreamMessage] = _progress_or_event,
) -> AsyncIterator[StreamMessage]:
    """Yield events until a command is over, or to the last event of the daemon."""
    while not is_over():
        try:
            async with asyncio.timeout(_WAITING_EVERY_S):
                event = await listener.next()
        except TimeoutError:
            yield {"waiting": _WAITING_EVERY_S}
            continue
        yield message_of(event)
        if event.name == DAEMON_STOPPED:
            return


async def _first(
    message: StreamMessage, others: AsyncIterator[StreamMessage]
) -> AsyncIterator[StreamMessage]:
    yield message
    async for other in others:
        yield other


async def _pauses(task: asyncio.Future[Any]) -> AsyncIterator[StreamMessage]:
    """Yield `waiting` until a task is over; does not cancel it."""
    while not (await asyncio.wait([task], timeout=_WAITING_EVERY_S))[0]:
        yield {"waiting": _WAITING_EVERY_S}


def _last_message(
    task: asyncio.Future[Any], message_of: Callable[[Any], StreamMessage]
) -> StreamMessage:
    outcome = daemon_exited() if task.cancelled() else task.result()
    return {"error": outcome.as_json()} if isinstance(outcome, CorralError) else message_of(outcome)


def _reloaded_message(result: ReloadResult) -> StreamMessage:
    return {"reloaded": reload_report(result)}


def _saved_message(saved: Sequence[Manifest]) -> StreamMessage:
    return {"slots": [saved_slot(manifest) for manifest in saved]}


def _warmed_message(warmed: Sequence[PrefillResult]) -> StreamMessage:
    return {"warmed": [warmed_instance(result) for result in warmed]}


def _moved_message(moved: MovedLayers) -> StreamMessage:
    return {"moved": moved}


async def _models(request: web.Request) -> list[str]:
    return await _member(request, "models", _is_names, '{"models": [names]}')


def _is_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_name_or_none(value: object) -> TypeGuard[str | None]:
    return value is None or isinstance(value, str)


def _is_table(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_bool(value: object) -> TypeGuard[bool]:
    return isinstance(value, bool)


async def _member(
    request: web.Request, name: str, is_valid: Callable[[object], TypeGuard[Value]], shape: str
) -> Value:
    try:
        value = orjson.loads(await request.read())[name]
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsInvalid(f"the body must be {shape}") from error
    if not is_valid(value):
        raise SettingsInvalid(f"the body must be {shape}")
    return value


async def _prompt(request: web.Request, model: str) -> WarmPrompt:
    """Return the prompt of a chat request, or of a system prompt `{"prompt": text}`."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise SettingsInvalid("the body must be a chat request in JSON") from error
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return prompts.of_text(f"for {model}", body["prompt"])
    return prompts.of_request(f"for {model}", body)
