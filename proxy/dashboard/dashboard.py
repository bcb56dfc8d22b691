"""The parts of the dashboard."""

from __future__ import annotations

from proxy.auth.api_keys import ApiKeys
from proxy.auth.sessions import Sessions
from proxy.body.bodies import Bodies
from proxy.dashboard.host import DashboardHost
from proxy.dashboard.page_endpoint import PageEndpoint
from proxy.dashboard.session_endpoint import SessionEndpoint
from proxy.routes import Routes


class Dashboard:
    def __init__(
        self, host: DashboardHost, sessions: Sessions, keys: ApiKeys, bodies: Bodies
    ) -> None:
        self._page = PageEndpoint(host.vendor)
        self._session = SessionEndpoint(sessions, keys, bodies)

    def add_routes(self, routes: Routes) -> None:
        self._page.add_routes(routes)
        self._session.add_routes(routes)
