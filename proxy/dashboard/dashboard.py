"""The parts of the dashboard."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from aiohttp import web

from proxy.auth.access import CHAT, Access
from proxy.auth.api_keys import ApiKeys
from proxy.auth.sessions import Sessions
from proxy.body.bodies import Bodies
from proxy.dashboard.control_endpoints import ControlEndpoints
from proxy.dashboard.host import DashboardHost
from proxy.dashboard.live_endpoint import LiveEndpoint
from proxy.dashboard.live_state import LiveState
from proxy.dashboard.page_endpoint import PageEndpoint
from proxy.dashboard.rates import INTERVAL_S
from proxy.dashboard.session_endpoint import SessionEndpoint
from proxy.dashboard.sources import Sources
from proxy.errors import ProxyError
from proxy.failures import persist
from proxy.routes import Handler, Routes


class Dashboard:
    def __init__(
        self, host: DashboardHost, keys: ApiKeys, bodies: Bodies, sources: Sources
    ) -> None:
        self.sessions = Sessions(keys)
        self.access = Access(keys, self.sessions)
        self._live = LiveState(
            host, sources, {"version": host.version, "has_keys": keys.are_needed}
        )
        self._parts = (
            PageEndpoint(host.vendor),
            SessionEndpoint(self.sessions, keys, bodies),
            LiveEndpoint(self._live, host, sources.server_state, self._is_admin),
            ControlEndpoints(host, sources.loader, has_keys=keys.are_needed),
        )

    def add_routes(self, routes: Routes, chat: Handler) -> None:
        for part in self._parts:
            part.add_routes(routes)
        routes.add(CHAT, post=chat)

    async def serve(self) -> None:
        await persist("dashboard", self._sample)

    async def _sample(self) -> NoReturn:
        """Take figures once a second."""
        while True:
            self._live.sample()
            await asyncio.sleep(INTERVAL_S)

    def _is_admin(self, request: web.BaseRequest) -> bool:
        try:
            key = self.access.key_of(request)
        except ProxyError:
            return False
        return key is not None and key.admin
