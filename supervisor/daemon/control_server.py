"""Serves the control socket: JSON over HTTP on a unix socket of mode 0600.

    GET  /v1/status     status of the daemon, its models and instances
    GET  /v1/trials     {"trials": [...]}, the figures of each model's trial
    GET  /v1/canaries   {"running": [...], "ended": [...]}, the models' canaries
    GET  /v1/balance    {"balances": [...]}, the workers of each split model, and suggested moves
    GET  /v1/slots      a CachesStatus: the places of the prompts of each model
    GET  /v1/requests   {"requests": [...]}, the requests in flight, oldest first
    POST /v1/requests/ID/cancel   end a request with an error
    POST /v1/records/QUESTION     {"asked": …}, a question to records.store.QUESTIONS; the answer
    POST /v1/dashboard/link       {"url": …}, a link that signs in one browser
    GET  /v1/events     events, until the client disconnects
    POST /v1/start      {"models": [names]}; until each is ready or has failed
    POST /v1/stop       {"models": [names]}; until each has stopped
    POST /v1/restart    {"models": [names]}; until each is ready or has failed
    POST /v1/load       as start
    POST /v1/unload     {"models": [names]}; until each has stopped; the next request loads it
    POST /v1/reload     {"dry_run": bool}; until the settings are applied or rejected
    POST /v1/slots/save {"models": [names]}; until their idle slots are saved
    POST /v1/slots/forget   a ForgetRequest; a ForgottenSlots when everything is deleted
    POST /v1/models/NAME/warm   a chat request; until each instance has prefilled its prompt
    POST /v1/models/NAME/balance   {"undo": bool}; until its layers are moved
    POST /v1/models/NAME/canary    {"engine", "share", "limit_s", "margin"}; until it serves
    POST /v1/models/NAME/canary/promote|withdraw    until it is promoted or withdrawn
    POST /v1/capture    {"model", "duration_s", "size_bytes", "requests"}; the lines of a capture
    POST /v1/capture/stop       end the running capture
    POST /v1/hosts      {}; be a desktop host until disconnect: first `host`, then events
    POST /v1/hosts/N/leave      leave; the stream of the host ends
    POST /v1/shutdown   drain and stop; until no engine runs

Responses with "until", /v1/events and /v1/hosts are streams of StreamMessage (control_messages).
A disconnect ends a capture, but no command.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from supervisor.daemon.control_messages import (
    ForgetRequest,
    StreamMessage,
    daemon_exited_error,
    request_status,
)
from supervisor.daemon.desktop import DesktopHosts
from supervisor.daemon.model_commands import canary_request
from supervisor.daemon.model_status import reload_report, saved_slot, warmed_instance
from supervisor.daemon.operations import DaemonService
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
from supervisor.experiments.capture_lines import (
    DURATION_MAX_S,
    SIZE_MAX_BYTES,
    SIZE_MIN_BYTES,
    CaptureLimits,
)
from supervisor.fleet.reload import ReloadResult
from supervisor.records.store import QUESTIONS


class _CaptureBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    duration_s: float = Field(gt=0, le=DURATION_MAX_S)
    size_bytes: int = Field(ge=SIZE_MIN_BYTES, le=SIZE_MAX_BYTES)
    requests: int | None = Field(ge=1)


def capture_request(body: bytes) -> tuple[str, CaptureLimits]:
    """Return a model and the limits; raises SettingsInvalid."""
    try:
        found = _CaptureBody.model_validate_json(body)
    except ValidationError as error:
        raise SettingsInvalid(
            'the body must be {"model", "duration_s", "size_bytes", "requests": number or null}'
        ) from error
    return found.model, CaptureLimits(found.duration_s, found.size_bytes, found.requests)


_MEMBERS: Final = ("model", "conversation", "request")


def forget_request(body: bytes) -> ForgetRequest:
    """Parse a body; raises SettingsInvalid."""
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


def records_question(question: str, body: bytes) -> object:
    """Parse what is asked of the records; raises SettingsInvalid."""
    try:
        kind, asked = QUESTIONS[question][0], orjson.loads(body)["asked"]
        found: object = TypeAdapter(kind).validate_python(asked)
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsInvalid("the body must be a question about records") from error
    return found


_WAITING_EVERY_S: Final = 5.0
_BODY_MAX_BYTES: Final = 2 * prompts.SIZE_MAX_BYTES

Value = TypeVar("Value")
_NAMES: TypeAdapter[list[str]] = TypeAdapter(list[str])
_TABLES: TypeAdapter[dict[str, object]] = TypeAdapter(dict[str, object])
_BOOL: TypeAdapter[bool] = TypeAdapter(bool)


@asynccontextmanager
async def serve(service: DaemonService, events: EventStream, path: Path) -> AsyncIterator[None]:
    app = web.Application(client_max_size=_BODY_MAX_BYTES, middlewares=[_errors_as_json])
    api = _Api(service, events)
    app.add_routes(
        [
            web.get("/v1/status", api.status),
            web.get("/v1/trials", api.trials),
            web.get("/v1/slots", api.caches),
            web.get("/v1/requests", api.requests),
            web.post("/v1/requests/{id}/cancel", api.cancel_request),
            web.post("/v1/records/{question}", api.records),
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
    def __init__(self, service: DaemonService, events: EventStream) -> None:
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

    async def records(self, request: web.Request) -> web.StreamResponse:
        question = request.match_info["question"]
        asked = records_question(question, await request.read())
        return _json(await self._service.records(question, asked))

    async def cancel_request(self, request: web.Request) -> web.StreamResponse:
        self._service.cancel_request(request.match_info["id"])
        return _json({})

    async def dashboard_link(self, _: web.Request) -> web.StreamResponse:
        return _json({"url": self._service.dashboard_link()})

    async def capture(self, request: web.Request) -> web.StreamResponse:
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
        undo = await _member(request, "undo", _BOOL, '{"undo": true or false}')
        task = self._service.balance(request.match_info["model"], undo=undo)
        return await _send_result(request, task, lambda moved: {"moved": moved})

    async def events(self, request: web.Request) -> web.StreamResponse:
        with self._events.listen() as listener:
            events = _events(listener, lambda: False, _event_line)
            return await _send(request, events, self._done_message)

    async def command(self, request: web.Request) -> web.StreamResponse:
        models = await _models(request)
        with self._events.listen() as listener:
            is_over = self._service.command(request.match_info["verb"], models)
            return await _send(request, _events(listener, is_over), self._done_message)

    async def reload(self, request: web.Request) -> web.StreamResponse:
        dry_run = await _member(request, "dry_run", _BOOL, '{"dry_run": true or false}')
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
        tables = await _member(request, "models", _TABLES, '{"models": {name: table}}')
        return await _send_result(request, self._service.add_models(tables), _reloaded_message)

    async def save_slots(self, request: web.Request) -> web.StreamResponse:
        task = self._service.save_slots(await _models(request))
        return await _send_result(
            request, task, lambda saved: {"slots": [saved_slot(manifest) for manifest in saved]}
        )

    async def forget_slots(self, request: web.Request) -> web.StreamResponse:
        task = self._service.forget_slots(forget_request(await request.read()))
        await asyncio.wait([task])
        outcome = daemon_exited_error() if task.cancelled() else task.result()
        if isinstance(outcome, CorralError):
            raise outcome
        return _json(outcome)

    async def warm(self, request: web.Request) -> web.StreamResponse:
        model = request.match_info["model"]
        task = self._service.warm(model, await _prompt(request, model))
        return await _send_result(
            request, task, lambda results: {"warmed": [warmed_instance(found) for found in results]}
        )

    async def host(self, request: web.Request) -> web.StreamResponse:
        hosts = self._hosts()
        with self._events.listen() as listener, hosts.join() as host:

            def is_over() -> bool:  # the last host stays until the daemon ends
                return not (hosts.has(host) or hosts.is_empty)

            async def messages() -> AsyncIterator[StreamMessage]:
                yield {"host": self._service.joined_host(host)}
                async for message in _events(listener, is_over, _event_line):
                    yield message

            return await _send(request, messages(), self._done_message)

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
            return await _send(request, _events(listener, lambda: False), self._done_message)

    def _done_message(self) -> StreamMessage:
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
    """Yield events until a command is over, or until the last event of the daemon."""
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


async def _send_result(
    request: web.Request, task: asyncio.Future[Any], message_of: Callable[[Any], StreamMessage]
) -> web.StreamResponse:
    """Send `waiting` until a task is over, then its result; a disconnect does not cancel it."""

    async def pauses() -> AsyncIterator[StreamMessage]:
        while not (await asyncio.wait([task], timeout=_WAITING_EVERY_S))[0]:
            yield {"waiting": _WAITING_EVERY_S}

    return await _send(request, pauses(), lambda: _last_message(task, message_of))


def _last_message(
    task: asyncio.Future[Any], message_of: Callable[[Any], StreamMessage]
) -> StreamMessage:
    outcome = daemon_exited_error() if task.cancelled() else task.result()
    return {"error": outcome.as_json()} if isinstance(outcome, CorralError) else message_of(outcome)


def _reloaded_message(result: ReloadResult) -> StreamMessage:
    return {"reloaded": reload_report(result)}


async def _models(request: web.Request) -> list[str]:
    return await _member(request, "models", _NAMES, '{"models": [names]}')


async def _member(
    request: web.Request, name: str, adapter: TypeAdapter[Value], shape: str
) -> Value:
    try:
        value = orjson.loads(await request.read())[name]
        return adapter.validate_python(value, strict=True)
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsInvalid(f"the body must be {shape}") from error


async def _prompt(request: web.Request, model: str) -> WarmPrompt:
    """Parse a chat request, or a system prompt `{"prompt": text}`."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise SettingsInvalid("the body must be a chat request in JSON") from error
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return prompts.of_text(f"for {model}", body["prompt"])
    return prompts.of_request(f"for {model}", body)
