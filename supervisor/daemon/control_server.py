"""Serves the operations of `control_client` on a unix socket of mode 0600: JSON over HTTP.

An operation is the method of DaemonService with its name, whose annotations validate the
parameters. A method returns

    an answer, or an awaitable        for an operation that answers at once
    a task                            the answer or an error is its result
    a function                        tells whether a command is over; the answer is the status
    a context manager                 of the lines of a capture; of a host and such a function

A disconnect ends a capture and the place of a host, but no task and no command.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_type_hints

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from supervisor import errors
from supervisor.daemon.control_client import OPERATIONS, Message, Operation
from supervisor.daemon.control_messages import daemon_exited_error
from supervisor.daemon.operations import DaemonService
from supervisor.engine import prompts
from supervisor.events import DAEMON_STOPPED, LOAD_PROGRESS, Event, EventStream, Listener


@asynccontextmanager
async def serve(
    service: DaemonService, events: EventStream, path: Path, waiting_every_s: float = 5.0
) -> AsyncIterator[None]:
    app = web.Application(client_max_size=2 * prompts.SIZE_MAX_BYTES, middlewares=[_errors_as_json])
    for operation in OPERATIONS.values():
        handler = functools.partial(_handle, service, events, waiting_every_s, operation)
        app.router.add_route(operation.method, operation.path, handler)
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
    except errors.CorralError as error:
        is_unknown = isinstance(
            error, errors.NoSuchModel | errors.NoSuchRequest | errors.NoSuchConversation
        )
        status = HTTPStatus.NOT_FOUND if is_unknown else HTTPStatus.CONFLICT
        return _json({"error": error.as_json()}, status)


def _json(content: object, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


async def _handle(
    service: DaemonService,
    events: EventStream,
    waiting_every_s: float,
    operation: Operation,
    request: web.Request,
) -> web.StreamResponse:
    arguments = await _arguments(_parameters(operation.name), request)
    begin = functools.partial(getattr(service, operation.name), **arguments)
    if operation.sends == "lines":
        return await _send_lines(request, begin())
    if operation.sends != "nothing":
        return await _send_messages(request, operation, begin, events, service, waiting_every_s)
    answer = begin()
    if isinstance(answer, asyncio.Future):
        await asyncio.wait([answer])
        answer = _outcome(answer)
    elif inspect.isawaitable(answer):
        answer = await answer
    if isinstance(answer, errors.CorralError):
        raise answer
    return _json({operation.member: answer} if operation.member else answer)


def _outcome(task: asyncio.Future[Any]) -> Any:
    return daemon_exited_error() if task.cancelled() else task.result()


async def _arguments(kind: type[BaseModel], request: web.Request) -> dict[str, Any]:
    """Return the arguments of an operation, from path and body; raises SettingsInvalid."""
    try:
        body = orjson.loads(await request.read() or b"{}")
        members = {"body": body} if "body" in kind.model_fields else {**body}
        arguments = kind.model_validate_json(orjson.dumps({**members, **request.match_info}))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise errors.SettingsInvalid(f"{name} in the body is invalid: {first['msg']}") from error
    except (TypeError, ValueError) as error:
        raise errors.SettingsInvalid("the body must be a JSON object") from error
    return {name: getattr(arguments, name) for name in kind.model_fields}


@functools.cache
def _parameters(operation: str) -> type[BaseModel]:
    method = getattr(DaemonService, operation)
    hints = get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if found.default is found.empty else found.default)
        for name, found in inspect.signature(method).parameters.items()
        if name in hints
    }
    return create_model("Parameters", __config__=ConfigDict(strict=True), **fields)


async def _send_lines(
    request: web.Request, capture: AbstractAsyncContextManager[AsyncGenerator[bytes, None]]
) -> web.StreamResponse:
    async with capture as lines:
        response = await _start_stream(request)
        async for line in lines:
            await response.write(line)
        return response


async def _start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    return response


async def _send_messages(
    request: web.Request,
    operation: Operation,
    begin: Callable[[], Any],
    events: EventStream,
    service: DaemonService,
    waiting_every_s: float,
) -> web.StreamResponse:
    """Send messages until a command is over or the daemon has stopped, then the answer."""
    with ExitStack() as stack:
        has_events = operation.sends != "waiting"
        listener = stack.enter_context(events.listen()) if has_events else Listener()
        begun, first = begin(), None
        if hasattr(begun, "__enter__"):
            host, begun = stack.enter_context(begun)
            first = {"host": host}
        task = begun if isinstance(begun, asyncio.Future) else None
        is_over = task.done if task else begun
        response = await _start_stream(request)
        if first:
            await _write(response, first)
        while not is_over():
            event = await _next(listener, task, waiting_every_s)
            if event is not None:
                await _write(response, _message(event, operation))
                if event.name == DAEMON_STOPPED:
                    break
            elif not is_over():
                await _write(response, {"waiting": waiting_every_s})
        answer = _outcome(task) if task else service.current_status()
        if isinstance(answer, errors.CorralError):
            await _write(response, {"error": answer.as_json()})
        else:
            await _write(response, {operation.member: answer})
        return response


async def _write(response: web.StreamResponse, message: Message) -> None:
    await response.write(orjson.dumps(message) + b"\n")


async def _next(
    listener: Listener, task: asyncio.Future[Any] | None, timeout_s: float
) -> Event | None:
    """Wait for an event or the end of a task; None without an event in time."""
    async with asyncio.TaskGroup() as group:
        event = group.create_task(listener.next())
        await asyncio.wait(
            [event, task] if task else [event],
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        event.cancel()
    return None if event.cancelled() else event.result()


def _message(event: Event, operation: Operation) -> Message:
    if event.name == LOAD_PROGRESS and operation.sends == "progress":
        instance, fraction = event.fields["instance"], event.fields["value"]
        return {"progress": {"instance": str(instance), "fraction": float(str(fraction))}}
    fields = dict(event.fields)
    at = event.at.isoformat()
    return {"event": {"name": event.name, "level": event.level, "at": at, "fields": fields}}
