"""`/corral/v1/models` of the dashboard: the models on this machine, their plans, and starts."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web
from attrs import define

from proxy.auth.access import check_admin
from proxy.dashboard.host import MachineModels, StartOptions
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest
from proxy.http.body import read_members
from proxy.http.middleware import PATH_ID, Routes, json_response
from proxy.request.request import client_of

_PATH: Final = "/corral/v1/models"
_NUMBER_MAX: Final = 2**31 - 1  # of an engine's options


@define(eq=False, slots=False)
class MachineModelsEndpoint(Feature):
    """The endpoints, for admins only; they raise SessionRequired and Forbidden for others."""

    _models: MachineModels
    _core: Core

    def add_routes(self, routes: Routes) -> None:
        routes.add(_PATH, get=self.list_models)
        routes.add(f"{_PATH}/{{id}}/plan", post=self.plan)
        routes.add(f"{_PATH}/{{id}}/start", post=self.start)

    async def list_models(self, request: web.BaseRequest) -> web.Response:
        check_admin(request)
        return json_response(await self._models.list_models())

    async def plan(self, request: web.BaseRequest) -> web.Response:
        """Plan a model with the options in the body; raises as `MachineModels.plan`."""
        check_admin(request)
        options = options_of(await self._members(request))
        return json_response(await self._models.plan(request[PATH_ID], options))

    async def start(self, request: web.BaseRequest) -> web.Response:
        """Start a model with the options in the body; raises as `MachineModels.start`."""
        check_admin(request)
        model, members = request[PATH_ID], await self._members(request)
        save = members.get("save", False)
        if not isinstance(save, bool):
            raise BadRequest("save must be true or false")
        await self._models.start(model, options_of(members), save=save)
        return json_response({"model": model, "verb": "start"})

    async def _members(self, request: web.BaseRequest) -> dict[str, Any]:
        with self._core.bodies.share(client_of(request)) as share:
            return await read_members(request, share)


def options_of(members: dict[str, Any]) -> StartOptions:
    """Check the members of a body; raises BadRequest."""
    profile = members.get("profile")
    if not (profile is None or isinstance(profile, str)):
        raise BadRequest("profile must be the name of a profile")
    return StartOptions(profile, _number(members, "ctx_size"), _number(members, "slots"))


def _number(members: dict[str, Any], name: str) -> int | None:
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _NUMBER_MAX:
        raise BadRequest(f"{name} must be a whole number from 1 to {_NUMBER_MAX}")
    return value
