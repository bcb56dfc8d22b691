"""`/models/load`, `/models/unload` and `/models/sse`, for clients of llama-server's router mode.

A client may load and unload the models that it may use. Nothing is cut: running requests finish
before their model is unloaded, and a model that the operator stopped is not loaded. For another
llama-corral a model is loaded only if the settings say so, and no model in use goes for it.

Source: tools/server/server-models.cpp of llama.cpp, build 10434.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from proxy.auth.api_keys import client_models
from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.errors import BadRequest, Draining, Forbidden, UnknownModel
from proxy.headers import EVENT_STREAM, HOP, RESPONSE_HEADERS
from proxy.json_response import json_response
from proxy.model_control.control import ModelControl
from proxy.model_control.events import Shown, event_text, events_between, shown
from proxy.models import ModelInfo, ModelLoader
from proxy.request import client_names, client_of, named_model
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.routes import Routes

# A comment keeps proxies from closing a silent stream. No event tells what a node has loaded, so
# the models are looked at then, too.
_PING_S: Final = 30.0
_PING: Final = b":\n\n"
_RUNNING: Final = frozenset({"loaded", "loading"})


_STREAM_HEADERS: Final = MappingProxyType(
    {"Content-Type": EVENT_STREAM, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
)


class ModelControlEndpoints:
    def __init__(
        self,
        loader: ModelLoader,
        control: ModelControl,
        server_state: ServerState,
        bodies: Bodies,
        *,
        loads_for_others: bool,
    ) -> None:
        self._loads_for_others = loads_for_others
        self._loader = loader
        self._control = control
        self._server_state = server_state
        self._bodies = bodies

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
        model_info = await self._named(request)
        if model_info.state in _RUNNING:
            raise BadRequest(f"{model_info.id} is already running")
        if HOP in request.headers:
            await self._load_for_others(model_info.id)
        else:
            self._control.load(model_info.id)
        return json_response({"success": True})

    async def _load_for_others(self, model: str) -> None:
        if not self._loads_for_others:
            raise Forbidden(
                'this machine loads no model for others; load_for_others = "idle" under [proxy] '
                "on it allows that"
            )
        with InFlightRequest(self._server_state.in_flight):
            await self._control.load_for_others(model)

    async def unload(self, request: web.BaseRequest) -> web.Response:
        """Begin to unload a model; raises as `load` does, BadRequest where it is not loaded."""
        model_info = await self._named(request)
        if model_info.state not in _RUNNING:
            raise BadRequest(f"{model_info.id} is not running")
        self._control.unload(model_info.id)
        return json_response({"success": True})

    async def events(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send what changes from now on, until the client disconnects or the server stops.

        A client that reads slowly gets the latest states, not each one between.
        """
        own = request[RESPONSE_HEADERS]
        response = web.StreamResponse(headers={**_STREAM_HEADERS, **own})
        with suppress(ConnectionError):  # the client's
            with suppress(Draining), InFlightRequest(self._server_state.watching):
                await self._send_events(request, response)
            await response.write_eof()
        return response

    async def _send_events(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        with self._control.changes() as changed:
            before = self._shown(request)
            await response.prepare(request)
            while True:
                is_changed = await _is_set(changed, _PING_S)
                changed.clear()
                after = self._shown(request)
                text = b"".join(map(event_text, events_between(before, after)))
                before = after
                if text or not is_changed:
                    await response.write(text or _PING)

    async def _named(self, request: web.BaseRequest) -> ModelInfo:
        """Return the model of this machine that the body names; `*` means none here."""
        in_flight = InFlightRequest(self._server_state.in_flight)
        with in_flight, self._bodies.share(client_of(request)) as share:
            name = named_model(await _members(request, share))
        if not name:
            raise BadRequest('the request names no model; send {"model": NAME}')
        names = client_names(self._loader, request)
        if (pick := names.get(name)) is None:
            raise UnknownModel(name, [one.id for one in names.model_infos])
        model = pick.model_info.id
        found = next(one for one in client_models(self._loader, request) if one.id == model)
        if not found.is_local:
            raise BadRequest(f"{model} is a model of another machine; load and unload it there")
        return found.local_only or found

    def _shown(self, request: web.BaseRequest) -> dict[str, Shown]:
        return {one.id: shown(one) for one in client_models(self._loader, request)}


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            return await event.wait()
    return False


async def _members(request: web.BaseRequest, share: Share) -> dict[str, Any]:
    body = await read_body(request, share)
    await check_complexity(body, share)
    return members_of(body)
