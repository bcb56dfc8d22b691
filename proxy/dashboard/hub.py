"""`/corral/v1/hub` and `/corral/v1/downloads`: the dashboard's searches and downloads."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from aiohttp import web
from attrs import define

from proxy.auth.access import check_admin
from proxy.dashboard.host import Hub
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest
from proxy.http.body import read_members
from proxy.http.middleware import Routes, json_response
from proxy.request.request import client_of

_DOWNLOADS: Final = "/corral/v1/downloads"
_WORDS_MAX: Final = 200  # characters


@define(eq=False, slots=False)
class HubEndpoint(Feature):
    """The endpoints, for admins only; they raise SessionRequired and Forbidden for others."""

    _hub: Hub
    _core: Core

    def add_routes(self, routes: Routes) -> None:
        routes.add("/corral/v1/hub", get=self.search)
        routes.add("/corral/v1/hub/fit", get=self.fit)
        routes.add(_DOWNLOADS, get=self.downloads, post=self.download)
        routes.add(f"{_DOWNLOADS}/cancel", post=self.cancel)

    async def search(self, request: web.BaseRequest) -> web.Response:
        check_admin(request)
        words = request.query.get("words", "").strip()
        if not words or len(words) > _WORDS_MAX:
            raise BadRequest(f"words must have 1 to {_WORDS_MAX} characters")
        return json_response({"repositories": await self._hub.search(words)})

    async def fit(self, request: web.BaseRequest) -> web.Response:
        """Say whether the model that the query names fits; raises as `Hub.fit`."""
        check_admin(request)
        return json_response(await self._hub.fit(request.query.get("name", "")))

    async def downloads(self, request: web.BaseRequest) -> web.Response:
        check_admin(request)
        return self._answer()

    async def download(self, request: web.BaseRequest) -> web.Response:
        """Begin the download that the body names; raises as `Hub.download`."""
        check_admin(request)
        self._hub.download(await self._name(request))
        return self._answer()

    async def cancel(self, request: web.BaseRequest) -> web.Response:
        """Cancel the download that the body names; raises as `Hub.cancel`."""
        check_admin(request)
        self._hub.cancel(await self._name(request))
        return self._answer()

    def _answer(self) -> web.Response:
        downloads, pinned = self._hub.downloads(), self._hub.pinned()
        return json_response(
            {"downloads": [*map(asdict, downloads)], "pinned": [*map(asdict, pinned)]}
        )

    async def _name(self, request: web.BaseRequest) -> str:
        with self._core.bodies.share(client_of(request)) as share:
            name = (await read_members(request, share)).get("name")
        if not isinstance(name, str):
            raise BadRequest('send {"name": "OWNER/NAME:QUANT"}')
        return name
