"""What of the proxy the dashboard shows."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.metrics.prometheus import Metrics
from proxy.models import ModelLoader
from proxy.requests.requests import Requests
from proxy.router.in_flight import ServerState
from proxy.router.router import Router


@dataclass(frozen=True, slots=True)
class Sources:
    router: Router
    loader: ModelLoader
    requests: Requests
    metrics: Metrics
    server_state: ServerState
