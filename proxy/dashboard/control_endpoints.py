"""What the page does: commands on models, logs, and settings of client programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final, get_args

from aiohttp import web

from proxy.auth.access import check_admin
from proxy.auth.api_keys import client_models
from proxy.dashboard.host import DashboardHost, Verb
from proxy.dashboard.live_endpoint import lines_of
from proxy.errors import BadRequest, UnknownModel
from proxy.json_response import json_response
from proxy.models import ModelLoader
from proxy.routes import PATH_ID, Handler, Routes

_LINES: Final = 500


class ControlEndpoints:
    """All are for admins."""

    def __init__(self, host: DashboardHost, loader: ModelLoader, *, has_keys: bool) -> None:
        self._host = host
        self._loader = loader
        self._has_keys = has_keys

    def add_routes(self, routes: Routes) -> None:
        for verb in get_args(Verb):
            routes.add(f"/corral/v1/models/{{id}}/{verb}", post=self._command(verb))
        routes.add("/corral/v1/logs", get=self.logs)
        routes.add("/corral/v1/logs/{id}", get=self.log)
        routes.add("/corral/v1/clients", get=self.clients)

    def _command(self, verb: Verb) -> Handler:
        async def begin(request: web.BaseRequest) -> web.Response:
            """Begin a command; the state tells how far it is.

            Raises:
                SessionRequired, Forbidden: The request is not an admin's.
                UnknownModel: There is no such model.
                BadRequest: It is a model of another machine.
            """
            check_admin(request)
            model = self._own(request)
            self._host.command(verb, model)
            return json_response({"model": model, "verb": verb})

        return begin

    async def logs(self, request: web.BaseRequest) -> web.Response:
        check_admin(request)
        return json_response({"sources": self._host.log_sources()})

    async def log(self, request: web.BaseRequest) -> web.Response:
        """Answer with the last lines of a log; raises NotFound."""
        check_admin(request)
        source = request[PATH_ID]
        lines = await self._host.log_tail(source, lines_of(request, _LINES))
        return json_response({"source": source, "lines": lines})

    async def clients(self, request: web.BaseRequest) -> web.Response:
        """Answer with settings of client programs; raises UnknownModel."""
        check_admin(request)
        found = asdict(await self._host.clients(request.query.get("model")))
        url = self._host.url
        urls = {"openai": f"{url}/v1", "anthropic": url}
        return json_response({**found, "needs_key": self._has_keys, "urls": urls})

    def _own(self, request: web.BaseRequest) -> str:
        name, models = request[PATH_ID], client_models(self._loader, request)
        info = next((one for one in models if one.id == name), None)
        if info is None:
            raise UnknownModel(name, [one.id for one in models])
        if not info.is_local:
            raise BadRequest(f"{name} is a model of another machine; control it there")
        return name
