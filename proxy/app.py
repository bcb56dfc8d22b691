"""Builds the proxy: all its parts, and the handlers of its addresses.

Besides the main address there may be one with Ollama's API and one with llama.cpp's web UI.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from proxy.apis.batch_completions import BatchCompletions
from proxy.apis.forwarded import ControlEndpoint, ForwardedEndpoints
from proxy.apis.generate import BatchTokenize, EngineEndpoints
from proxy.apis.llama_server import ModelControlEndpoints
from proxy.apis.responses import ResponsesEndpoint
from proxy.auth.access import BATCH_TOKENIZE, Access
from proxy.auth.api_keys import Admission, ApiKeys, TokenLimits
from proxy.auth.keys_file import Key
from proxy.auth.sessions import Sessions
from proxy.batches.jobs import Jobs, JobStorage
from proxy.batches.own_requests import OwnRequests
from proxy.dashboard.dashboard import Dashboard
from proxy.dashboard.host import DashboardHost
from proxy.dashboard.live import Sources
from proxy.endpoints.local import LocalEndpoints
from proxy.endpoints.prometheus import Metrics
from proxy.endpoints.prompts import EstimateEndpoint, WarmEndpoint
from proxy.endpoints.requests import Requests, RequestsEndpoint
from proxy.endpoints.usage import UsageEndpoint, UsageReader
from proxy.forward.capture import CapturePoint
from proxy.forward.forward import Forward
from proxy.http.body import Bodies
from proxy.http.connections import Connections, descriptors_max, limit_of
from proxy.http.middleware import Handler, RequestMiddleware, Routes
from proxy.http.tls import RenewedContext, server_context
from proxy.observe.past import Conversations, RequestHistory
from proxy.observe.record import Emit, ServerState
from proxy.observe.tracing import start_tracer
from proxy.request.models import EngineReader, ModelControl, ModelLoader, OllamaHost, PromptWarmer
from proxy.request.stored_responses import ResponseStore
from proxy.router.batch_queue import BatchQueue, BatchQueueStats, metrics_of
from proxy.router.estimator import Estimator
from proxy.router.forecast import LoadForecaster
from proxy.router.router import Router
from proxy.settings import ProxySettings


def ollama_routes(
    forwarded: ForwardedEndpoints, loader: ModelLoader, host: OllamaHost, bodies: Bodies
) -> Callable[[Routes], None]:
    """Return a function that adds Ollama's API to routes."""
    # Imported here, because most daemons do not use it and save its memory.
    from proxy.apis.ollama import OllamaEndpoints  # noqa: PLC0415

    return OllamaEndpoints(forwarded, loader, host, bodies).add_routes


def handle_ollama(
    settings: ProxySettings,
    routes: Routes,
    add_ollama: Callable[[Routes], None],
    guard: Callable[[ProxySettings, Routes], Handler],
) -> Handler | None:
    """Add Ollama's API to the routes; return the handler of its separate address, if any."""
    if settings.ollama.enabled:
        add_ollama(routes)
    if (listen := settings.ollama.listen) is None:
        return None
    add_ollama(beside := Routes(beneath=routes))
    return guard(settings.model_copy(update={"listen": listen}), beside)


def handle_engine_ui(
    settings: ProxySettings,
    router: Router,
    keys: ApiKeys,
    routes: Routes,
    guard: Callable[[ProxySettings, Routes, Access], Handler],
) -> Handler | None:
    """Return the handler of the web UI's address, if there is one."""
    if settings.engine_ui is None:
        return None
    # Imported here, because most daemons do not use it and save its memory.
    from proxy.endpoints.engine_ui import EngineUi, EngineUiAccess  # noqa: PLC0415

    EngineUi(router, settings).add_routes(beside := Routes(beneath=routes))
    own = settings.model_copy(update={"listen": settings.engine_ui})
    return guard(own, beside, EngineUiAccess(keys))


@dataclass(frozen=True, slots=True)
class App:
    """The proxy's request handler, and the parts that `proxy.server.Server` needs.

    Attributes:
        handle_ollama: Handler of the address with Ollama's API, if there is one.
        handle_engine_ui: Handler of the address with llama.cpp's web UI, if there is one.
        token_limits: Token limits of the API keys; each request's tokens are charged to them.
    """

    handle: Handler
    close: Callable[[], None]  # once no request is in flight
    serve: Callable[[], Coroutine[Any, Any, None]]  # background work, until cancelled
    server_state: ServerState
    connections: Connections[Hashable]
    requests: Requests
    capture: CapturePoint
    batch_stats: Callable[[], Mapping[str, BatchQueueStats]]  # by model
    # Announces a port in the local network until cancelled; None if it is not announced.
    announce: Callable[[int], Coroutine[Any, Any, None]] | None = None
    tls: RenewedContext | None = None  # None: no TLS
    handle_ollama: Handler | None = None
    sessions: Sessions | None = None
    handle_engine_ui: Handler | None = None
    token_limits: TokenLimits | None = None


def build_app(  # noqa: PLR0913, PLR0917 (optional arguments serve single endpoints)
    router: Router,
    loader: ModelLoader,
    settings: ProxySettings,
    metrics: Metrics,
    warmer: PromptWarmer | None = None,
    job_storage: JobStorage | None = None,
    engine: EngineReader | None = None,
    control: ModelControl | None = None,
    own_key: Key | None = None,
    ollama: OllamaHost | None = None,
    process: str = "",
    dashboard: DashboardHost | None = None,
    history: RequestHistory | None = None,
    load_forecaster: LoadForecaster | None = None,
    usage: UsageReader | None = None,
    conversations: Conversations | None = None,
) -> App:
    """Build the application.

    Optional parts add endpoints: `warmer` for prefilling, `job_storage` for jobs, `engine` for GPUs
    and the runtime, `control` for loading and unloading models, `ollama` for Ollama's API,
    `dashboard` for its page, `history` for past requests, `usage` for usage. `own_key` is valid in
    addition to the API keys file. `process` identifies this process for other proxies. Without a
    `load_forecaster`, estimates have no loads; without `conversations`, conversations cannot be
    forgotten.

    Raises:
        ConfigError: An origin, a host, the API keys file or a certificate is invalid.
    """
    server_state = ServerState(process)
    capture = CapturePoint()
    estimator = Estimator(router, load_forecaster)
    metrics.add(estimator.collect)
    keys = ApiKeys(settings.api_keys_file, metrics.emit, own_key=own_key)
    admission = Admission(keys)
    forward = Forward(
        router, loader, settings, metrics.emit, estimator, capture, admission=admission
    )
    batch_queue = BatchQueue(settings.batch.config)
    metrics.add(lambda: metrics_of(batch_queue.stats()))
    loads_for_others = settings.load_for_others == "idle"
    bodies = Bodies(settings)
    own_requests = OwnRequests(forward, bodies, metrics, server_state, admission)
    requests = Requests(router, server_state)
    forwarded = ForwardedEndpoints(
        loader,
        forward,
        server_state,
        metrics,
        warmer,
        bodies,
        BatchCompletions(own_requests, batch_queue),
    )
    connections = Connections[Hashable](limit_of(settings.max_connections, descriptors_max()))
    routes = Routes()
    LocalEndpoints(
        router,
        loader,
        metrics,
        batch_queue,
        has_keys=keys.are_needed,
        loads_for_others=loads_for_others,
    ).add_routes(routes)
    RequestsEndpoint(
        requests, history, conversations, shares_caches=settings.share_caches == "all"
    ).add_routes(routes)
    EstimateEndpoint(loader, estimator, server_state, bodies).add_routes(routes)
    ControlEndpoint(loader, router, server_state, bodies).add_routes(routes)
    UsageEndpoint(usage).add_routes(routes)
    if warmer:
        WarmEndpoint(loader, warmer, server_state, bodies, admission, router).add_routes(routes)
    if engine:
        EngineEndpoints(loader, engine, server_state, bodies).add_routes(routes)
    if control:
        ModelControlEndpoints(
            loader, control, server_state, bodies, loads_for_others=loads_for_others
        ).add_routes(routes)
    forwarded.add_routes(routes)
    ResponsesEndpoint(forwarded, ResponseStore(settings.stored_responses)).add_routes(routes)
    routes.add(
        BATCH_TOKENIZE,
        post=functools.partial(forwarded.answer_with, BatchTokenize(own_requests).serve),
    )
    board = None
    if dashboard and settings.dashboard:
        sources = Sources(router, loader, requests, metrics, server_state)
        board = Dashboard(dashboard, keys, bodies, sources)
        board.add_routes(routes, forwarded.chat)
    access = board.access if board else Access(keys)
    tasks = [board.serve] if board else []
    tracer = start_tracer(settings.tracing, process, metrics.emit)
    closing = [bodies.close, *([tracer.close] if tracer else [])]

    def guard(settings: ProxySettings, routes: Routes, access: Access = access) -> Handler:
        return RequestMiddleware(
            settings,
            routes,
            server_state,
            metrics.emit,
            connections,
            access,
            admission,
            tracer=tracer,
        ).handle

    app = App(
        guard(settings, routes),
        functools.partial(_call_all, closing),
        functools.partial(_serve, tasks),
        server_state,
        connections,
        requests,
        capture,
        batch_queue.stats,
        _announcement(settings, process, metrics.emit),
        RenewedContext(tls.files, functools.partial(server_context, tls), metrics.emit)
        if (tls := settings.tls)
        else None,
        sessions=board.sessions if board else None,
        handle_engine_ui=handle_engine_ui(settings, router, keys, routes, guard),
        token_limits=admission.tokens,
    )
    if ollama and settings.ollama.is_on:
        add_ollama = ollama_routes(forwarded, loader, ollama, bodies)
        app = replace(app, handle_ollama=handle_ollama(settings, routes, add_ollama, guard))
    if job_storage is None:
        return app
    jobs = Jobs(job_storage, own_requests, loader, keys, bodies, metrics.emit)
    jobs.add_routes(routes, server_state)
    metrics.add(jobs.collect)
    tasks.append(jobs.serve)
    return replace(app, close=functools.partial(_call_all, [jobs.close, *closing]))


def _call_all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _announcement(
    settings: ProxySettings, process: str, emit: Emit
) -> Callable[[int], Coroutine[Any, Any, None]] | None:
    if not settings.announce:
        return None
    # Imported here, because most daemons do not use it and save its memory.
    from proxy.nodes.mdns import announce  # noqa: PLC0415

    return lambda port: announce(settings.host, port, process, emit)


async def _serve(tasks: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(task())
