"""The base class of the proxy's features, and the parts that they share.

A feature adds its endpoints, works in the background, reports metrics and frees its resources.
To add one, write its class and list it in `proxy/app.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric

from proxy.auth.access import Access
from proxy.auth.api_keys import Admission, ApiKeys
from proxy.endpoints.prometheus import Metrics
from proxy.http.body import Bodies
from proxy.http.middleware import Routes
from proxy.observe.record import ServerState
from proxy.request.models import ModelLoader
from proxy.router.router import Router
from proxy.settings import ProxySettings


class Feature:
    """A feature; each method does nothing by default.

    Attributes:
        address: A further address of its endpoints, at which all others are too.
        access: Who may use that address; None for the same as at the main one.
        is_at_main_address: Whether its endpoints are at the main address.
    """

    address: str | None = None
    access: Access | None = None
    is_at_main_address = True

    def add_routes(self, routes: Routes) -> None:
        """Add its endpoints."""

    async def prepare(self) -> None:
        """Prepare, before the server listens."""

    async def run(self) -> None:
        """Work in the background until cancelled."""

    def metrics(self) -> Iterable[Metric]:
        """Return its part of `/metrics`, computed now."""
        return ()

    def close(self) -> None:
        """Free resources, such as files and connections; no request is in flight any more."""


@dataclass(frozen=True, slots=True)
class Core:
    """The parts of one proxy that its features share."""

    router: Router
    loader: ModelLoader
    settings: ProxySettings
    metrics: Metrics
    server_state: ServerState
    bodies: Bodies
    admission: Admission

    @property
    def keys(self) -> ApiKeys:
        return self.admission.keys
