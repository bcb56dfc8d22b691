"""llama-server's endpoints about models and running completions.

`/props` and `/lora-adapters` do not show paths of this machine. If a model is not loaded, `/props`
repeats the last response of its instance until the model changes. It never loads a model, because
editors request it for every model in the list, and a web page can make a browser request it. If
there are several models and the request names none, the response is that of llama-server's router
mode, with the members of the default model, if any.

`/models/load`, `/models/unload`: a client may load and unload the models that it may use. Running
requests finish before their model is unloaded, and a model that the operator stopped is not loaded.
Another llama-corral may load a model only if the settings allow it, and no model in use is unloaded
for that. `/models/sse` sends changes of the models that a client may see.

`/v1/chat/completions/control` controls a completion that an instance is generating. Only its client
knows the id of a completion; the proxy does not read the ids in a stream. So every instance of the
model gets the request, and the one that generates the completion acts on it. The answer has
`success`, false if no completion has the id.

`/tools` and `/cors-proxy` are the tools and MCP servers that an engine runs (`engine_tools`). They
take no slot. If a request names no model, the first model that has tools answers, loaded ones
first. An instance that holds the conversation of the request gets it, else always the same
instance, because its MCP servers have state.

Source: llama-server, builds 10434 and 11434: `model_path`, and `is_sleeping` for a model that is
out of memory and returns with a request; `get_router_props` of tools/server/server-models.cpp;
`/lora-adapters` is a list of objects, each with the `path` of its file; server-tools.cpp and
server-cors-proxy.h for the headers that they read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.auth.access import check_may_use_tools
from proxy.cache.fingerprint import ConversationFingerprint
from proxy.cache.prompt import session_hash
from proxy.common.headers import EVENT_STREAM, HOP, JSON, PRIVATE, RESPONSE_HEADERS
from proxy.endpoints.feature import Core, Feature
from proxy.endpoints.local import model_json
from proxy.errors import (
    BadRequest,
    Draining,
    Forbidden,
    NotLoaded,
    ProxyError,
    UnknownModel,
)
from proxy.forward.forward import for_node
from proxy.forward.response import StreamTransform
from proxy.forward.upstream_errors import reclassify_error
from proxy.http.api_formats import OPENAI, data_event
from proxy.http.body import check_complexity, members_of, read_body, read_members
from proxy.http.middleware import Routes, json_response
from proxy.observe.record import InFlightRequest
from proxy.request.models import (
    ModelControl,
    ModelInfo,
    ModelNames,
    client_models,
    client_names,
    load_in_time,
)
from proxy.request.request import client_of, named_model, session_id
from proxy.router.lease import InstanceStats
from proxy.upstream.client import FetchedBody, UpstreamRequest, UpstreamResponse, fetch
from proxy.upstream.upstream import Upstream


class Rewritten(StreamTransform):
    """Holds a response, and rewrites its body if the request succeeded.

    Nothing is sent before its end, so another instance can take over.
    """

    holds_streams = True

    def __init__(
        self, rewrite: Callable[[bytes], bytes], max_bytes: int = StreamTransform.max_bytes
    ) -> None:
        self._rewrite = rewrite
        self.max_bytes = max_bytes
        self.too_long = f"is larger than {max_bytes} bytes"

    def whole(self, status: int, body: bytes) -> bytes:
        return self._rewrite(body) if status == HTTPStatus.OK else body


PROPS: Final = "/props"
# Most of the body is the chat template; the longest known has 30 kB.
PAGE_MAX_BYTES: Final = 1024**2
# Tells clients that there are several models, and that a request loads them.
ROUTER: Final[Mapping[str, object]] = MappingProxyType({"role": "router", "models_autoload": True})
NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


class Remembered:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[ModelInfo, bytes, float]] = {}  # with body and time in s

    def keep(self, model_info: ModelInfo, body: bytes, known: Collection[str]) -> None:
        """Remember the response of a model, and forget models that are not in `known`."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in known}
        self._seen[model_info.id] = model_info, body, self._clock()

    def page(
        self, model_info: ModelInfo, added: Mapping[str, object] = NOTHING
    ) -> web.Response | None:
        """Return the last response for a model with the members `added`.

        None if there is none, or the model has changed. `Age` is in seconds (RFC 9111 section 5.1).
        """
        if model_info.id not in self._seen:
            return None
        before, body, seen_at_s = self._seen[model_info.id]
        if before.context_length != model_info.context_length or before.slots != model_info.slots:
            return None
        members = orjson.loads(body)
        if "is_sleeping" in members:
            members["is_sleeping"] = True
        age_s = int(self._clock() - seen_at_s)
        headers = {"Content-Type": JSON, "Age": str(age_s)}
        return web.Response(body=orjson.dumps({**members, **added}), headers=headers)


def router_page(models: int) -> dict[str, object]:
    """Return `/props` of the router for this number of models, with llama-server's own members.

    It is sent if the request means no model, or if the model's properties are not known.
    """
    return {
        **ROUTER,
        "max_instances": models,
        "build_info": "llama-corral",
        "ui_settings": {},
        "cors_proxy_enabled": False,
        "model_alias": "llama-corral",
        "model_path": "none",
        "default_generation_settings": {"params": None, "n_ctx": 0},
    }


LORA_ADAPTERS: Final = "/lora-adapters"


def without_paths(body: bytes) -> bytes:
    """Reduce `model_path` of a page, and `path` of each adapter in a list, to the file's name."""
    try:
        page = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    entries, name = (page, "path") if isinstance(page, list) else ([page], "model_path")
    objects = (entry for entry in entries if isinstance(entry, dict))
    found = [entry for entry in objects if isinstance(entry.get(name), str)]
    for entry in found:
        entry[name] = PurePosixPath(PureWindowsPath(entry[name]).name).name
    return orjson.dumps(page) if found else body


Event = Mapping[str, object]

# llama-server reports stages; here one number covers all replicas of a model.
_STAGE: Final = "text_model"


def events_between(
    before: Mapping[str, ModelInfo], after: Mapping[str, ModelInfo]
) -> Iterator[Event]:
    """Yield the events that bring a client from `before` to `after`; both are by model."""
    for model in before.keys() - after.keys():
        yield {"model": model, "event": "model_remove"}
    if after.keys() - before.keys():
        yield {"model": "*", "event": "models_reload"}
    for model, now in after.items():
        was = before.get(model, now)
        if (was.state, was.load_progress) != (now.state, now.load_progress):
            yield {"model": model, "event": "status_change", "data": _data(now)}


def _data(model_info: ModelInfo) -> dict[str, object]:
    is_failed = model_info.state == "failed"
    data: dict[str, object] = {"status": "unloaded" if is_failed else model_info.state}
    if data["status"] == "unloaded":
        data["exit_code"] = 1 if is_failed else 0
    elif model_info.state == "loaded":
        data["info"] = model_json(model_info)
    if model_info.load_progress is not None and not is_failed:
        progress = {"stages": [_STAGE], "current": _STAGE, "value": model_info.load_progress}
        data["progress"] = progress
    return data


_PING: Final = b":\n\n"
_RUNNING: Final = frozenset({"loaded", "loading"})


_STREAM_HEADERS: Final = MappingProxyType(
    {"Content-Type": EVENT_STREAM, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
)


class ModelControlEndpoints(Feature):
    """Loads, unloads and watches models.

    A comment every `ping_s` keeps proxies from closing a silent stream. As no event reports a
    node's loaded models, they are compared at the same interval.
    """

    def __init__(self, core: Core, control: ModelControl, ping_s: float = 30.0) -> None:
        self._core = core
        self._control = control
        self._ping_s = ping_s

    def add_routes(self, routes: Routes) -> None:
        routes.add("/models/load", post=self.load)
        routes.add("/models/unload", post=self.unload)
        routes.add("/models/sse", get=self.events)

    async def load(self, request: web.BaseRequest) -> web.Response:
        """Begin to load a model.

        Raises:
            BadRequest: It is loaded or loading, or is a model of another machine.
            Forbidden: Another llama-corral asks, and this one loads nothing for others.
            ProxyError: As `ModelControl.load` and `read_body` do.
        """
        model_info = await self._find_model(request)
        if model_info.state in _RUNNING:
            raise BadRequest(f"{model_info.id} is already running")
        if HOP not in request.headers:
            self._control.load(model_info.id)
        elif self._core.settings.load_for_others == "idle":
            with InFlightRequest(self._core.server_state.in_flight):
                await self._control.load_for_others(model_info.id)
        else:
            raise Forbidden(
                'this machine loads no model for others; load_for_others = "idle" under [proxy] '
                "on it allows that"
            )
        return json_response({"success": True})

    async def unload(self, request: web.BaseRequest) -> web.Response:
        """Begin to unload a model; raises as `load` does, and BadRequest if it is not loaded."""
        model_info = await self._find_model(request)
        if model_info.state not in _RUNNING:
            raise BadRequest(f"{model_info.id} is not running")
        self._control.unload(model_info.id)
        return json_response({"success": True})

    async def events(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send changes from now on, until the client disconnects or the server stops.

        A client that reads slowly gets the latest states, without the ones in between.
        """
        own = request[RESPONSE_HEADERS]
        response = web.StreamResponse(headers={**_STREAM_HEADERS, **own})
        with suppress(ConnectionError):  # the client's
            with suppress(Draining), InFlightRequest(self._core.server_state.watching):
                await self._send_events(request, response)
            await response.write_eof()
        return response

    async def _send_events(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        with self._control.changes() as changed:
            before = self._models(request)
            await response.prepare(request)
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._ping_s):
                        await changed.wait()
                is_changed = changed.is_set()
                changed.clear()
                after = self._models(request)
                text = b"".join(map(data_event, events_between(before, after)))
                before = after
                if text or not is_changed:
                    await response.write(text or _PING)

    async def _find_model(self, request: web.BaseRequest) -> ModelInfo:
        """Return the model of this machine that the body names; `*` names none."""
        in_flight = InFlightRequest(self._core.server_state.in_flight)
        with in_flight, self._core.bodies.share(client_of(request)) as share:
            name = named_model(await read_members(request, share))
        if not name:
            raise BadRequest('the request names no model; send {"model": NAME}')
        names = client_names(self._core.loader, request)
        if (pick := names.get(name)) is None:
            raise UnknownModel(name, [model.id for model in names.model_infos])
        model = pick.model_info.id
        found = next(info for info in client_models(self._core.loader, request) if info.id == model)
        if not found.is_local:
            raise BadRequest(f"{model} is a model of another machine; load and unload it there")
        return found.local_only or found

    def _models(self, request: web.BaseRequest) -> dict[str, ModelInfo]:
        return {model.id: model for model in client_models(self._core.loader, request)}


COMPLETION_CONTROL: Final = "/v1/chat/completions/control"
# An engine acts between two batches; a batch may take seconds.
_CONTROL_TIMEOUT_S: Final = 30.0


async def control_completion(core: Core, request: web.BaseRequest) -> web.Response:
    """Return the answer of the instance that acted, else of any instance.

    Raises:
        NotLoaded: No instance of the model runs.
        ProxyError: As `read_body` and `ModelNames.resolve` do, or no instance answered.
    """
    in_flight = InFlightRequest(core.server_state.in_flight)
    with in_flight, core.bodies.share(client_of(request)) as share:
        body = await read_body(request, share)
        await check_complexity(body, share)
        name = named_model(members_of(body)) or request.query.get("model")
        model = client_names(core.loader, request).resolve(name).model_info.id
        instances = core.router.instances()
        upstreams = [found.upstream for found in instances if found.upstream.model == model]
        if not upstreams:
            raise NotLoaded(f"{model} is not loaded, so it generates no completion")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_control(core, upstream, body)) for upstream in upstreams]
    results = [task.result() for task in tasks]
    answers = [result for result in results if isinstance(result, FetchedBody)]
    if not answers:
        raise next(result for result in results if isinstance(result, ProxyError))
    answer = first_successful(answers)
    status, body = reclassify_error(answer.status, answer.body)
    if status >= HTTPStatus.BAD_REQUEST:
        body = OPENAI.engine_error(status, body)
    return web.Response(body=body, status=status, headers={"Content-Type": JSON})


async def _control(core: Core, upstream: Upstream, body: bytes) -> FetchedBody | ProxyError:
    headers = CIMultiDict({"Content-Type": JSON})
    request = UpstreamRequest("POST", COMPLETION_CONTROL, "", headers, body)
    if upstream.node:
        request = for_node(request, upstream.node)
    limits = _CONTROL_TIMEOUT_S, 64 * 1024
    try:
        return await fetch(upstream, request, core.settings, *limits)
    except ProxyError as error:
        return error


def first_successful(answers: Sequence[FetchedBody]) -> FetchedBody:
    return next(filter(_is_success, answers), answers[0])


def _is_success(answer: FetchedBody) -> bool:
    try:
        members = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return False
    return answer.status == 200 and isinstance(members, dict) and members.get("success") is True


_TOOL_FIELDS: Final = ("Accept", "Content-Type", "X-Resp-Type", "X-Tool-Cwd", "X-Tool-Runtime")
# `/cors-proxy` sends these on to the other server, without the prefix.
_PROXIED_PREFIX: Final = "x-llama-server-proxy-header-"
_TOOL_RESPONSE_FIELDS: Final = ("Content-Type", "Mcp-Protocol-Version", "Mcp-Session-Id")
# The output of a tool or of another server is no page of ours, and runs no script.
_TOOL_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {**PRIVATE, "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'"}
)


class EngineTools(Feature):
    """Passes requests for tools to an engine, of clients that may run commands here."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def add_routes(self, routes: Routes) -> None:
        for path in ("/tools", "/cors-proxy"):
            routes.add(path, get=self.forward, post=self.forward)

    async def forward(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the response of an engine.

        Raises:
            Forbidden: No model, or not this one, has tools, or the client may not use them.
            ProxyError: As `read_body` and `load_in_time` do, or the engine failed.
        """
        names = client_names(self._core.loader, request).local
        if not any(info.engine_tools for info in names.model_infos):
            raise Forbidden(
                "no model runs tools here; engine_tools = true under [models.NAME] allows it"
            )
        check_may_use_tools(request)
        in_flight = InFlightRequest(self._core.server_state.in_flight)
        with in_flight, self._core.bodies.share(client_of(request)) as share:
            body = await read_body(request, share) if request.method == "POST" else b""
            name = request.query.get("model")
            if body and request.path == "/tools":
                await check_complexity(body, share)
                name = named_model(members_of(body)) or name
            model = _model_with_tools(names, name)
            upstream = self._find_instance(request, model.id)
            if upstream is None:
                await load_in_time(self._core.loader, model.id, share.settings.queue_timeout_s)
                upstream = self._find_instance(request, model.id)
            if upstream is None:
                raise NotLoaded(f"{model.id} is not loaded")
            passed = tool_request(request, body, model)
            async with UpstreamResponse(upstream, passed, self._core.settings) as found:
                return await relay(request, found, _TOOL_RESPONSE_FIELDS, _TOOL_HEADERS)

    def _find_instance(self, request: web.BaseRequest, model: str) -> Upstream | None:
        router = self._core.router
        instances = (found for found in router.instances() if found.in_service)
        here = {found.upstream.name: found.upstream for found in instances if is_own(found, model)}
        owner = None
        if session := session_id(request.headers, NOTHING):
            digest = session_hash(model, client_of(request), session)
            owner = router.cache.owner(ConversationFingerprint((digest,)))
        return here.get(owner or "") or (here[min(here)] if here else None)


def is_own(stats: InstanceStats, model: str) -> bool:
    return stats.upstream.model == model and stats.upstream.node is None


def _model_with_tools(names: ModelNames, name: str | None) -> ModelInfo:
    """Return the model that answers a request for tools; raises Forbidden, UnknownModel."""
    if not name:
        with_tools = [info for info in names.model_infos if info.engine_tools]
        return min(with_tools, key=lambda info: (info.id != names.default, info.state != "loaded"))
    model = names.resolve(name).model_info
    if not model.engine_tools:
        raise Forbidden(f"the engine of {model.id} runs no tools (engine_tools is not set)")
    return model


def tool_request(request: web.BaseRequest, body: bytes, model: ModelInfo) -> UpstreamRequest:
    """Return the request for the engine, with the fields that it reads; raises Forbidden."""
    if "X-Tool-Runtime" in request.headers and not model.chooses_tool_runtime:
        raise Forbidden(
            f"a client may not choose where a tool of {model.id} runs: its flags have "
            "tools-runtime, or not the tool exec_shell_command"
        )
    is_tool = request.path == "/tools"
    fields = CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if (name.title() in _TOOL_FIELDS if is_tool else name.lower().startswith(_PROXIED_PREFIX))
    )
    return UpstreamRequest(
        request.method, request.path, request.rel_url.raw_query_string, fields, body
    )


async def relay(
    request: web.BaseRequest,
    found: UpstreamResponse,
    passed: Collection[str],
    own: Mapping[str, str],
) -> web.StreamResponse:
    """Send an engine's response to the client: its fields in `passed`, and our `own`."""
    kept = {name: found.headers[name] for name in passed if name in found.headers}
    final = request[RESPONSE_HEADERS]
    headers = {**kept, **own, **final}
    response = web.StreamResponse(status=found.status, headers=headers)
    with suppress(ConnectionError):  # the client's; an instance's error is an UpstreamFailed
        await response.prepare(request)
        while chunk := await found.read():
            await response.write(chunk)
        await response.write_eof()
    return response
