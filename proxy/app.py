"""The list of the proxy's features, and the handlers of its addresses.

Besides the main address there may be one with Ollama's API and one with llama.cpp's web UI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.apis.batch_completions import BatchCompletions
from proxy.apis.forwarded import ForwardedEndpoints, ResponsesEndpoint
from proxy.apis.generate import EngineEndpoints
from proxy.apis.llama_server import EngineTools, ModelControlEndpoints
from proxy.auth.access import Access
from proxy.auth.api_keys import Admission, ApiKeys
from proxy.auth.keys_file import Key
from proxy.auth.sessions import Sessions
from proxy.batches.jobs import Jobs
from proxy.batches.own_requests import OwnRequests
from proxy.dashboard.dashboard import Dashboard
from proxy.dashboard.host import DashboardHost
from proxy.dashboard.machines import MachinesEndpoint
from proxy.endpoints.feature import Core, Feature
from proxy.endpoints.local import LocalEndpoints, WarmEndpoint
from proxy.endpoints.prometheus import Metrics
from proxy.endpoints.requests import (
    EstimateEndpoint,
    Requests,
    RequestsEndpoint,
    UsageEndpoint,
    UsageReader,
)
from proxy.endpoints.slot_files import SlotFileHost, SlotFilesEndpoint
from proxy.forward.forward import Forward
from proxy.forward.inspection import CapturePoint
from proxy.http.body import Bodies
from proxy.http.connections import Connections, descriptors_max, limit_of
from proxy.http.middleware import Handler, RequestMiddleware, Routes
from proxy.http.tls import RenewedContext, renewed_server_context
from proxy.observe.past import Conversations, RequestHistory
from proxy.observe.record import ServerState
from proxy.observe.tracing import start_tracer
from proxy.request.models import EngineReader, ModelControl, ModelLoader, OllamaHost, PromptWarmer
from proxy.request.stored_responses import ResponseStore
from proxy.router.batch_queue import BatchQueue
from proxy.router.estimator import Estimator, LoadForecaster
from proxy.router.router import Router
from proxy.settings import JobSettings, ProxySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The host's interface for the proxy. Without an optional part, its endpoints do not exist."""

    loader: ModelLoader
    process: str = ""  # identifies this process for other proxies
    tls: RenewedContext | None = None  # the context of connections; None: made from the settings
    own_key: Key | None = None  # a key that is valid in addition to those of the API keys file
    warmer: PromptWarmer | None = None
    jobs: tuple[Path, JobSettings] | None = None  # the private directory of jobs, their settings
    engine: EngineReader | None = None
    control: ModelControl | None = None
    ollama: OllamaHost | None = None
    dashboard: DashboardHost | None = None
    history: RequestHistory | None = None
    load_forecaster: LoadForecaster | None = None  # without it, estimates have no loads
    usage: UsageReader | None = None
    slot_files: SlotFileHost | None = None
    conversations: Conversations | None = None  # without it, conversations cannot be forgotten


class App:
    """All parts of one proxy; `proxy.server.Server` serves them. Raises ConfigError.

    Attributes:
        handle: The handler of the main address.
        handlers: Further addresses, and their handlers.
        machines: Figures of this machine; None without a host for the dashboard.
        sessions: None without a dashboard.
        tls: None without TLS.
    """

    def __init__(
        self, router: Router, settings: ProxySettings, metrics: Metrics, backend: Backend
    ) -> None:
        keys = ApiKeys(
            settings.api_keys_file,
            metrics.emit,
            own_key=backend.own_key,
            auth_proxy=settings.auth_proxy,
        )
        self.core = Core(
            router,
            backend.loader,
            settings,
            metrics,
            ServerState(backend.process),
            Bodies(settings),
            Admission(keys),
        )
        self.capture = CapturePoint()
        self.batch_queue = BatchQueue(settings.batch.config)
        self.machines: MachinesEndpoint | None = None
        self.requests = Requests(router, self.core.server_state)
        has_dashboard = backend.dashboard and settings.dashboard
        self.sessions = Sessions(keys) if has_dashboard else None
        self._access = Access(keys, self.sessions)
        limit = limit_of(settings.max_connections, descriptors_max())
        self.connections = Connections[Hashable](limit)
        self._tracer = start_tracer(settings.tracing, backend.process, metrics.emit)
        self.tls = backend.tls or renewed_server_context(settings.tls, metrics.emit)
        self._routes = Routes()
        self._features = tuple(self._make_features(backend))
        if settings.api_keys_file:
            router.signals.charged.connect(self.core.admission.tokens.charge)
        for feature in self._features:
            metrics.add(feature.metrics)
            if feature.is_at_main_address:
                feature.add_routes(self._routes)
        self.handle = self._handler(settings, self._routes, self._access)
        self.handlers = [
            (feature.address, self._handle_beside(feature, feature.address))
            for feature in self._features
            if feature.address
        ]

    def _make_features(self, backend: Backend) -> Iterator[Feature]:
        """Yield all features; of two with the same endpoint, the later one answers it."""
        core, settings = self.core, self.core.settings
        estimator = Estimator(core.router, backend.load_forecaster)
        forward = Forward(
            core.router,
            core.loader,
            settings,
            core.metrics.emit,
            estimator,
            self.capture,
            admission=core.admission,
            process=backend.process,
        )
        own = OwnRequests(core, forward)
        batches = BatchCompletions(own, self.batch_queue)
        forwarded = ForwardedEndpoints(core, forward, batches, backend.warmer)
        yield from self._make_local_features(backend, estimator)
        yield forwarded
        yield ResponsesEndpoint(forwarded, ResponseStore(settings.stored_responses))
        if backend.dashboard:
            self.machines = MachinesEndpoint(core, backend.dashboard, self.requests)
            yield self.machines
        if backend.dashboard and self.sessions:
            sessions, requests = (self.sessions, self._access), self.requests
            yield Dashboard(core, backend.dashboard, *sessions, requests, forwarded.chat)
        if backend.jobs:
            yield Jobs(core, own, *backend.jobs)
        # The next two are imported here, because most daemons do not use them and save the memory.
        if backend.ollama and settings.ollama.is_on:
            from proxy.apis.ollama import OllamaEndpoints  # noqa: PLC0415

            yield OllamaEndpoints(core, forwarded, backend.ollama)
        if settings.engine_ui:
            from proxy.endpoints.engine_ui import EngineUi  # noqa: PLC0415

            yield EngineUi(core)

    def _make_local_features(self, backend: Backend, estimator: Estimator) -> Iterator[Feature]:
        """Yield the features that forward no request."""
        core = self.core
        yield LocalEndpoints(core, self.batch_queue)
        yield RequestsEndpoint(core, self.requests, backend.history, backend.conversations)
        yield EstimateEndpoint(core, estimator)
        yield EngineTools(core)
        if backend.usage:
            yield UsageEndpoint(core, backend.usage)
        if backend.slot_files:
            yield SlotFilesEndpoint(core, backend.slot_files)
        if backend.warmer:
            yield WarmEndpoint(core, backend.warmer)
        if backend.engine:
            yield EngineEndpoints(core, backend.engine)
        if backend.control:
            yield ModelControlEndpoints(core, backend.control)

    def _handle_beside(self, feature: Feature, address: str) -> Handler:
        feature.add_routes(routes := Routes(beneath=self._routes))
        settings = self.core.settings.model_copy(update={"listen": address})
        return self._handler(settings, routes, feature.access or self._access)

    def _handler(self, settings: ProxySettings, routes: Routes, access: Access) -> Handler:
        core = self.core
        return RequestMiddleware(
            settings,
            routes,
            core.server_state,
            core.metrics.report,
            self.connections,
            access,
            core.admission,
            tracer=self._tracer,
        ).handle

    async def prepare(self) -> None:
        """Prepare, before the server listens."""
        for feature in self._features:
            await feature.prepare()

    async def run(self) -> None:
        """Do the features' background work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for feature in self._features:
                group.create_task(feature.run())

    def close(self) -> None:
        """Close files and threads, once no request is in flight."""
        for feature in self._features:
            feature.close()
        self.core.bodies.close()
        if self._tracer:
            self._tracer.close()
