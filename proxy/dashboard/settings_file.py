"""`/corral/v1/settings`: reads, checks and saves the settings file."""

from __future__ import annotations

from aiohttp import web
from attrs import define

from proxy.auth.access import check_may_edit_settings
from proxy.dashboard.host import SettingsFile
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest
from proxy.http.body import read_members
from proxy.http.middleware import Routes, json_response
from proxy.request.request import client_of


@define(eq=False, slots=False)
class SettingsFileEndpoint(Feature):
    """The endpoints; they raise SessionRequired and Forbidden as `check_may_edit_settings`."""

    _file: SettingsFile
    _core: Core

    def add_routes(self, routes: Routes) -> None:
        routes.add("/corral/v1/settings", get=self.read, post=self.save)
        routes.add("/corral/v1/settings/check", post=self.check)

    async def read(self, request: web.BaseRequest) -> web.Response:
        check_may_edit_settings(request)
        return json_response(await self._file.read())

    async def check(self, request: web.BaseRequest) -> web.Response:
        """Check the text in the body; raises as `SettingsFile.check`."""
        check_may_edit_settings(request)
        (text,) = await self._texts(request, "text")
        return json_response(await self._file.check(text))

    async def save(self, request: web.BaseRequest) -> web.Response:
        """Save the text in the body; raises as `SettingsFile.save`."""
        check_may_edit_settings(request)
        text, etag = await self._texts(request, "text", "etag")
        return json_response(await self._file.save(text, etag))

    async def _texts(self, request: web.BaseRequest, *names: str) -> list[str]:
        with self._core.bodies.share(client_of(request)) as share:
            members = await read_members(request, share)
        values = [members.get(name) for name in names]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(names):
            raise BadRequest(f"send {' and '.join(names)} as texts")
        return texts
