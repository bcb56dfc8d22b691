"""The daemon's side of the control socket: JSON over HTTP on a 0600 unix socket.

    GET  /v1/status     what runs
    GET  /v1/events     what happens, line by line, until the client leaves
    POST /v1/start      {"models": [names]}; lines until each is ready or has failed
    POST /v1/stop       {"models": [names]}; lines until each is down
    POST /v1/restart    {"models": [names]}; lines until each is ready or has failed
    POST /v1/load       {"models": [names]}; the same as start
    POST /v1/unload     {"models": [names]}; lines until each is down, until a request calls it
    POST /v1/reload     {"dry_run": bool}; lines until the settings are taken in, or refused
    POST /v1/slots/save {"models": [names]}; lines until what their idle slots hold is saved
    POST /v1/models/NAME/warm   a chat request; lines until each instance has read its prompt
    POST /v1/shutdown   drain and end; lines until nothing runs any more

A client that leaves a stream changes nothing: what it asked for goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final, Protocol, TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from supervisor.control.messages import DaemonStatus, StreamMessage
from supervisor.control.status import reload_report, saved_slot, warmed_instance
from supervisor.errors import CorralError, DaemonBusy, NoSuchModel, SettingsInvalid
from supervisor.events import EventStream, Listener
from supervisor.fleet.cache_commands import PrefilledInstance
from supervisor.reload.reload import ReloadResult
from supervisor.slot_store.manifest import Manifest
from supervisor.warmup import prompts
from supervisor.warmup.prompts import WarmPrompt

_WAITING_EVERY_S: Final = 5.0
# Said when nothing runs any more, and before this socket closes: every stream ends with it.
_LAST_EVENT: Final = "daemon.stopped"
# A prompt to be read ahead is the largest thing that anybody sends.
_BODY_MAX_BYTES: Final = 2 * prompts.SIZE_MAX_BYTES
_ENDING: Final = DaemonBusy("the daemon ended before it was done", hint="corral logs shows why")

Result = TypeVar("Result")


class Service(Protocol):
    """What the control API needs of the daemon."""

    def status(self) -> DaemonStatus:
        """Return what runs."""

    async def refresh(self) -> None:
        """Bring the figures of `status` up to date; takes a fraction of a second at most."""

    def command(self, verb: str, models: Sequence[str]) -> Callable[[], bool]:
        """Begin to start, stop or restart models; return what tells whether that is over.

        Raises:
            NoSuchModel: A name is not configured.
        """

    def reload(self, *, dry_run: bool) -> asyncio.Future[ReloadResult | CorralError]:
        """Begin to reload the settings, or to find out what that would do.

        Not a dry run, it ends with an event. It is cancelled when the daemon ends before it.

        Raises:
            DaemonBusy: A reload is under way, or the daemon ends.
        """

    def save_slots(self, models: Sequence[str]) -> asyncio.Future[list[Manifest]]:
        """Begin to save what the idle slots of models hold; it ends with all that is kept then.

        Raises:
            NoSuchModel: A name is not configured.
            DaemonBusy: The daemon ends.
        """

    def warm(
        self, model: str, prompt: WarmPrompt
    ) -> asyncio.Future[list[PrefilledInstance] | CorralError]:
        """Begin to have every instance of a model read a prompt.

        Raises:
            NoSuchModel: The name is not configured.
            DaemonBusy: The daemon ends.
        """

    def shutdown(self, reason: str) -> None:
        """Begin to drain and end; said again, shorten the drain."""


@asynccontextmanager
async def serve(service: Service, events: EventStream, path: Path) -> AsyncIterator[None]:
    """Answer on the control socket for the length of the block."""
    app = web.Application(client_max_size=_BODY_MAX_BYTES, middlewares=[_errors_as_json])
    api = _Api(service, events)
    app.add_routes(
        [
            web.get("/v1/status", api.status),
            web.get("/v1/events", api.events),
            web.post("/v1/{verb:start|stop|restart|load|unload}", api.command),
            web.post("/v1/reload", api.reload),
            web.post("/v1/slots/save", api.save_slots),
            web.post("/v1/models/{model}/warm", api.warm),
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
        is_unknown = isinstance(error, NoSuchModel)
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

    async def events(self, request: web.Request) -> web.StreamResponse:
        with self._events.listen() as listener:
            return await self._stream(request, listener, lambda: False, self._done)

    async def command(self, request: web.Request) -> web.StreamResponse:
        models = await _models(request)
        with self._events.listen() as listener:
            is_over = self._service.command(request.match_info["verb"], models)
            return await self._stream(request, listener, is_over, self._done)

    async def reload(self, request: web.Request) -> web.StreamResponse:
        dry_run = await _dry_run(request)
        with self._events.listen() as listener:
            reloading = self._service.reload(dry_run=dry_run)
            if dry_run:
                await asyncio.wait([reloading])
            return await self._stream(
                request, listener, reloading.done, lambda: _outcome(reloading)
            )

    async def save_slots(self, request: web.Request) -> web.StreamResponse:
        saving = self._service.save_slots(await _models(request))
        return await _until(
            request, saving, lambda kept: {"slots": [saved_slot(one) for one in kept]}
        )

    async def warm(self, request: web.Request) -> web.StreamResponse:
        model = request.match_info["model"]
        warming = self._service.warm(model, await _prompt(request, model))
        return await _until(request, warming, _warmed)

    async def shutdown(self, request: web.Request) -> web.StreamResponse:
        with self._events.listen() as listener:
            self._service.shutdown("asked over the control socket")
            return await self._stream(request, listener, lambda: False, self._done)

    def _done(self) -> StreamMessage:
        return {"done": self._service.status()}

    @staticmethod
    async def _stream(
        request: web.Request,
        listener: Listener,
        is_over: Callable[[], bool],
        last_line: Callable[[], StreamMessage],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        while not is_over():
            line = await _next_line(listener)
            await _write(response, line)
            if line.get("event", {}).get("name") == _LAST_EVENT:
                break
        await _write(response, last_line())
        return response


async def _until(
    request: web.Request, task: asyncio.Future[Result], last_line: Callable[[Result], StreamMessage]
) -> web.StreamResponse:
    """Answer with lines until something is over. A client that leaves does not end it."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    while not (await asyncio.wait([task], timeout=_WAITING_EVERY_S))[0]:
        await _write(response, {"waiting": _WAITING_EVERY_S})
    await _write(response, _error_line(_ENDING) if task.cancelled() else last_line(task.result()))
    return response


def _warmed(outcome: list[PrefilledInstance] | CorralError) -> StreamMessage:
    if isinstance(outcome, CorralError):
        return _error_line(outcome)
    return {"warmed": [warmed_instance(one) for one in outcome]}


def _outcome(reloading: asyncio.Future[ReloadResult | CorralError]) -> StreamMessage:
    if reloading.cancelled():
        return _error_line(_ENDING)
    outcome = reloading.result()
    if isinstance(outcome, CorralError):
        return _error_line(outcome)
    return {"reloaded": reload_report(outcome)}


def _error_line(error: CorralError) -> StreamMessage:
    return {
        "error": {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "log": error.log,
        }
    }


async def _next_line(listener: Listener) -> StreamMessage:
    try:
        async with asyncio.timeout(_WAITING_EVERY_S):
            event = await listener.next()
    except TimeoutError:
        return {"waiting": _WAITING_EVERY_S}
    return {
        "event": {
            "name": event.name,
            "level": event.level,
            "at": event.at.isoformat(),
            "fields": dict(event.fields),
        }
    }


async def _write(response: web.StreamResponse, line: StreamMessage) -> None:
    await response.write(orjson.dumps(line) + b"\n")


async def _dry_run(request: web.Request) -> bool:
    try:
        dry_run = orjson.loads(await request.read())["dry_run"]
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsInvalid('the body must be {"dry_run": true or false}') from error
    if not isinstance(dry_run, bool):
        raise SettingsInvalid('the body must be {"dry_run": true or false}')
    return dry_run


async def _prompt(request: web.Request, model: str) -> WarmPrompt:
    """Return the prompt of a chat request, or of a system prompt as `{"prompt": text}`."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise SettingsInvalid("the body must be a chat request in JSON") from error
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return prompts.of_text(f"for {model}", body["prompt"])
    return prompts.of_request(f"for {model}", body)


async def _models(request: web.Request) -> list[str]:
    try:
        models = orjson.loads(await request.read())["models"]
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsInvalid('the body must be {"models": [names]}') from error
    if not (isinstance(models, list) and all(isinstance(name, str) for name in models)):
        raise SettingsInvalid('the body must be {"models": [names]}')
    return models
