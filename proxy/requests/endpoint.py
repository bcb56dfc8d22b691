"""`/corral/v1/requests`: a client's own requests in flight; to an admin, everybody's."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from proxy.auth.api_keys import visible_client
from proxy.json_response import json_response
from proxy.requests.requests import Requests
from proxy.routes import PATH_ID, Routes

_PATH = "/corral/v1/requests"


class RequestsEndpoint:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def add_routes(self, routes: Routes) -> None:
        routes.add(_PATH, get=self.list)
        routes.add(f"{_PATH}/{{id}}/cancel", post=self.cancel)

    async def list(self, request: web.BaseRequest) -> web.Response:
        found = self._requests.stats(visible_client(request))
        return json_response({"requests": [asdict(one) for one in found]})

    async def cancel(self, request: web.BaseRequest) -> web.Response:
        """Raises NotFound."""
        self._requests.cancel(request[PATH_ID], visible_client(request))
        return json_response({"id": request[PATH_ID], "cancelled": True})
