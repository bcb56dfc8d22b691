"""Every endpoint, and what answers it.

GET   /health  /v1/health                 whether any model can be served
GET   /v1/models  /models  (and /{id})    the models
GET   /slots                              the slots of all instances, as llama-server lists its own
GET   /corral/v1/slots                    the same with instances, totals and queues
GET   /metrics                            metrics for Prometheus
GET   /corral/v1/batch                    how batch requests gathered
      /v1/files  /v1/batches              jobs that outlive a connection (`proxy.jobs`)
POST  /corral/v1/models/{id}/warm         prefill a prompt
POST  /v1/batch/completions               many prompts
POST  /generate  /batch/generate  /stream/generate  /batch/tokenize    an instance, translated
POST  /v1/gpu/warmup                      load a model
GET   /v1/gpu/status                      what of the models is on GPUs
GET   /corral/v1/runtime                  the engine
the table in `endpoints`                  an instance of the model that the request names
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Final

import orjson
from aiohttp import web

from proxy.access_log import CLIENT_GONE
from proxy.auth.api_keys import KEY, ApiKeys, visible
from proxy.batch import completions
from proxy.batch.batch_queue import BatchQueue, gathers
from proxy.batch.completions import BatchCompletions
from proxy.batch.requests import OwnRequests
from proxy.batch.stats import metrics_of
from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.connections import Connections, descriptors_max, limit_of
from proxy.endpoints import ENDPOINTS, EndpointKind
from proxy.errors import NotLoaded, ProxyError, TooManyRequests, Unavailable
from proxy.forward import props
from proxy.forward.client_response import ClientResponse, error_response
from proxy.forward.forward import Forward
from proxy.forward.props import PropsResponse, Remembered
from proxy.generate import batch_tokenize
from proxy.generate.batch_tokenize import BatchTokenize
from proxy.generate.gpu import EngineEndpoints
from proxy.generate.translated import TRANSLATED, TranslatedResponse
from proxy.headers import HOP
from proxy.jobs.jobs import Jobs, JobStorage
from proxy.metrics import models_endpoint
from proxy.metrics.prometheus import Metrics
from proxy.metrics.slots_endpoint import engine_list, has_idle, overview
from proxy.middleware import ACCESS_RECORD, RequestMiddleware
from proxy.models import (
    EngineReader,
    ModelInfo,
    ModelLoader,
    ModelNames,
    PromptWarmer,
    ResolvedModel,
    with_variants,
    without_nodes,
)
from proxy.prompt_cache.shared_prefixes import SharedPrefixes
from proxy.request import ProxyRequest, Translation, client_of, read_request
from proxy.request_limits.check import check
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.router.router import Router
from proxy.routes import PATH_ID, Handler, Routes
from proxy.settings import ProxySettings

_WARM_RETRY_AFTER_S: Final = 5

_Serve = Callable[[web.BaseRequest, ClientResponse, Share, ModelNames], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class App:
    """The proxy's request handler, with what `proxy.server.Server` needs of it."""

    handle: Handler
    close: Callable[[], None]  # once no request is in flight
    serve: Callable[[], Awaitable[None]]  # what no client waits for; until cancelled
    server_state: ServerState
    connections: Connections[Hashable]


def build_app(  # noqa: PLR0913, PLR0917 (the optional ones are what endpoints need)
    router: Router,
    loader: ModelLoader,
    settings: ProxySettings,
    metrics: Metrics,
    warmer: PromptWarmer | None = None,
    job_storage: JobStorage | None = None,
    engine: EngineReader | None = None,
) -> App:
    """Build the application.

    Without a `warmer`, it has no endpoint for prefilling, without `job_storage` none for jobs, and
    without an `engine` none about GPUs and the runtime.

    Raises:
        ConfigError: An origin, a host or the API keys file is invalid.
    """
    server_state = ServerState()
    forward = Forward(router, loader, settings, metrics.emit)
    batch_queue = BatchQueue(settings.batch.config)
    metrics.add(lambda: metrics_of(batch_queue.stats()))
    local = LocalEndpoints(
        router, loader, metrics, batch_queue, has_keys=settings.api_keys_file is not None
    )
    bodies = Bodies(settings)
    requests = OwnRequests(forward, bodies, metrics, server_state)
    batches = BatchCompletions(requests, batch_queue)
    forwarded = ForwardedEndpoints(loader, forward, server_state, metrics, warmer, bodies, batches)
    limit = limit_of(settings.max_connections, descriptors_max())
    connections = Connections[Hashable](limit)
    routes = Routes()
    for path in ("/health", "/v1/health"):
        routes.add(path, get=local.health)
    for path in ("/models", "/v1/models"):
        routes.add(path, get=local.models)
        routes.add(path + "/{id}", get=local.model)
    routes.add("/slots", get=local.slots)
    routes.add("/corral/v1/slots", get=local.overview)
    routes.add("/corral/v1/batch", get=local.batch)
    routes.add("/metrics", get=local.metrics)
    if warmer:
        warm = WarmEndpoint(loader, warmer, server_state, bodies)
        routes.add("/corral/v1/models/{id}/warm", post=warm.answer)
    if engine:
        EngineEndpoints(loader, engine, server_state, bodies).add_routes(routes)
    forwarded.add_routes(routes)
    tokenize = functools.partial(forwarded.served_by, BatchTokenize(requests).serve)
    routes.add(batch_tokenize.PATH, post=tokenize)
    keys = ApiKeys(settings.api_keys_file, metrics.emit)
    middleware = RequestMiddleware(settings, routes, server_state, metrics.emit, connections, keys)
    app = App(middleware.handle, bodies.close, _serve_nothing, server_state, connections)
    if job_storage is None:
        return app
    jobs = Jobs(job_storage, requests, loader, keys, bodies, metrics.emit)
    jobs.add_routes(routes, server_state)
    metrics.add(jobs.collect)

    def close() -> None:
        jobs.close()
        bodies.close()

    return replace(app, serve=jobs.serve, close=close)


async def _serve_nothing() -> None:
    pass


class LocalEndpoints:
    def __init__(
        self,
        router: Router,
        loader: ModelLoader,
        metrics: Metrics,
        batch_queue: BatchQueue,
        *,
        has_keys: bool,
    ) -> None:
        self._batch_queue = batch_queue
        self._has_keys = has_keys
        self._router = router
        self._loader = loader
        self._metrics = metrics

    async def health(self, request: web.BaseRequest) -> web.Response:
        model_infos = self._loader.models()
        if sick := models_endpoint.unavailable_reason(model_infos):
            return error_response(request.path, sick)
        if self._has_keys and request[KEY] is None:
            return _json(dict(models_endpoint.HEALTHY))
        return _json(models_endpoint.health(model_infos, self._router.instances()))

    async def models(self, request: web.BaseRequest) -> web.Response:
        return _json(models_endpoint.model_list(with_variants(self._model_infos(request))))

    async def model(self, request: web.BaseRequest) -> web.Response:
        names = ModelNames(with_variants(self._model_infos(request)))
        return _json(models_endpoint.model_json(names.resolve(request[PATH_ID]).model_info))

    async def slots(self, request: web.BaseRequest) -> web.Response:
        listed = engine_list(self._router.instances(), self._named(request), time.monotonic())
        if "fail_on_no_slot" in request.query and not has_idle(listed):
            raise Unavailable("no slot is free; retry later")
        return _json(listed)

    async def overview(self, request: web.BaseRequest) -> web.Response:
        model_infos, passes = self._named(request), await self._metrics.passes(self._router)
        instances, queues = self._router.instances(), self._router.queues()
        return _json(overview(instances, queues, model_infos, time.monotonic(), passes))

    async def batch(self, request: web.BaseRequest) -> web.Response:
        stats, waiting = self._batch_queue.stats(), self._batch_queue.waiting()
        shown = [one.id for one in self._named(request) if one.id in stats]
        models = {name: {"waiting": waiting[name], **asdict(stats[name])} for name in shown}
        return _json({"config": self._batch_queue.config, "models": models})

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        accept = ",".join(request.headers.getall("Accept", ()))
        body, content_type = await self._metrics.render(
            accept, self._model_infos(request), self._router
        )
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _model_infos(self, request: web.BaseRequest) -> Sequence[ModelInfo]:
        return _model_infos(self._loader, request)

    def _named(self, request: web.BaseRequest) -> Sequence[ModelInfo]:
        """The model in the query; without one, all that the client may see."""
        model_infos = self._model_infos(request)
        name = request.query.get("model")
        return [ModelNames(model_infos).resolve(name).model_info] if name else model_infos


class ForwardedEndpoints:
    """Endpoints that an instance answers."""

    def __init__(  # noqa: PLR0913, PLR0917 (what a request passes through)
        self,
        loader: ModelLoader,
        forward: Forward,
        server_state: ServerState,
        metrics: Metrics,
        warmer: PromptWarmer | None,
        bodies: Bodies,
        batches: BatchCompletions,
    ) -> None:
        self._loader = loader
        self._batches = batches
        self._forward = forward
        self._server_state = server_state
        self._metrics = metrics
        self._warmer = warmer
        self._bodies = bodies
        self._shared_prefixes = SharedPrefixes()
        self._remembered = Remembered()

    def add_routes(self, routes: Routes) -> None:
        routes.add(props.PATH, get=self.props)
        for path in ENDPOINTS["POST"]:
            routes.add(path, post=self.answer)
        routes.add(completions.PATH, post=self.batch)
        for path, response in TRANSLATED.items():
            routes.add(path, post=functools.partial(self.translated, response))

    async def props(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer `/props`, from memory where its model is not loaded."""
        model_infos = _model_infos(self._loader, request)
        answer = PropsResponse(request, request[ACCESS_RECORD])
        try:
            response = await self._answered(request, answer, self._serve)
        except NotLoaded:
            found = self._remembered.page(
                ModelNames(model_infos).resolve(request.query.get("model")).model_info
            )
            if found is None:
                raise
            answer.record.model = None  # a page of our own is not counted
            return found
        if answer.page:
            model_info = ModelNames(model_infos).resolve(request.query.get("model")).model_info
            self._remembered.keep(
                model_info, answer.page, [one.id for one in self._loader.models()]
            )
        return response

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._answered(
            request, ClientResponse(request, request[ACCESS_RECORD]), self._serve
        )

    async def batch(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._answered(
            request, ClientResponse(request, request[ACCESS_RECORD]), self._batches.serve
        )

    async def served_by(self, serve: _Serve, request: web.BaseRequest) -> web.StreamResponse:
        return await self._answered(request, ClientResponse(request, request[ACCESS_RECORD]), serve)

    async def translated(
        self, response: type[TranslatedResponse], request: web.BaseRequest
    ) -> web.StreamResponse:
        answer = response(request, request[ACCESS_RECORD])
        serve = functools.partial(self._serve, translation=answer.translation())
        return await self._answered(request, answer, serve)

    async def _answered(
        self, request: web.BaseRequest, answer: ClientResponse, serve: _Serve
    ) -> web.StreamResponse:
        try:
            body = self._bodies.share(client_of(request))
            in_flight = InFlightRequest(self._server_state.in_flight)
            with in_flight, self._metrics.counting(answer.record), body as share:
                await serve(request, answer, share, self._names(request))
        except ConnectionError:  # the client's: an instance's is an UpstreamFailed by now
            answer.record.status = CLIENT_GONE
        except ProxyError as error:
            if not answer.has_begun:
                raise
            answer.record.status = error.status
            await answer.abort(error)
        return answer.response

    def _names(self, request: web.BaseRequest) -> ModelNames:
        """The models that the client may use; for another proxy, without nodes."""
        names = self._loader.names()
        if HOP in request.headers:
            names = names.local
        key = request[KEY]
        return names.visible(key.models) if key else names

    async def _serve(
        self,
        request: web.BaseRequest,
        answer: ClientResponse,
        share: Share,
        names: ModelNames,
        *,
        translation: Translation | None = None,
    ) -> None:
        record = answer.record
        proxy_request = await read_request(request, record.request_id, names, share, translation)
        record.model, record.kind = proxy_request.model, proxy_request.kind
        if gathers(proxy_request):
            await self._batches.queue.gather(proxy_request.model)
        await self._forward.handle(proxy_request, answer)
        if record.status == HTTPStatus.OK:
            self._learn(proxy_request)

    def _learn(self, proxy_request: ProxyRequest) -> None:
        """Learn a shared prefix, if that is enabled."""
        if self._warmer is None or not self._warmer.learns(proxy_request.model):
            return
        if prefix := self._shared_prefixes.observe(
            proxy_request.model, proxy_request.kind, proxy_request.json
        ):
            self._warmer.learn(proxy_request.model, prefix)


class WarmEndpoint:
    """Prefills a prompt, given as a chat request.

    It loads no model, reaches no other machine, and changes only caches. One prompt at a time is
    prefilled for a model, while no client needs its instances; a client that leaves ends it.
    """

    def __init__(
        self,
        loader: ModelLoader,
        warmer: PromptWarmer,
        server_state: ServerState,
        bodies: Bodies,
    ) -> None:
        self._loader = loader
        self._warmer = warmer
        self._server_state = server_state
        self._bodies = bodies
        self._prefilling: set[str] = set()

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer with the tokens that each instance prefilled.

        Raises:
            UnknownModel: No model here has the name.
            LimitExceeded: The prompt exceeds the limits of an engine.
            TooManyRequests: A prompt is being prefilled for the model already.
            ProxyError: As `PromptWarmer.warm` and `read_body` do.
        """
        key = request[KEY]
        names = self._loader.names().local.visible(key.models if key else None)
        pick = names.resolve(request[PATH_ID])
        in_flight = InFlightRequest(self._server_state.in_flight)
        with in_flight, self._bodies.share(client_of(request)) as share:
            return await self._read(request, pick, share)

    async def _read(
        self, request: web.BaseRequest, pick: ResolvedModel, share: Share
    ) -> web.Response:
        body = await read_body(request, share)
        await check_complexity(body, share)
        members = await share.run(len(body), lambda: members_of(body))
        if pick.variant:
            members = pick.variant.applied(members)
        check(EndpointKind.CHAT, members, share.settings.limits)
        model = pick.model_info.id
        if model in self._prefilling:
            message = f"{model} is already prefilling a prompt; retry later"
            raise TooManyRequests(message, _WARM_RETRY_AFTER_S)
        self._prefilling.add(model)
        try:
            warmed = await self._warmer.warm(model, members)
        finally:
            self._prefilling.discard(model)
        data = [
            {"instance": one.instance, "tokens": one.tokens, "cached": one.cached_tokens}
            for one in warmed
        ]
        return _json({"data": data})


def _model_infos(loader: ModelLoader, request: web.BaseRequest) -> Sequence[ModelInfo]:
    """The models that the client may see; for another proxy, without nodes."""
    model_infos = loader.models()
    if HOP in request.headers:
        model_infos = without_nodes(model_infos)
    return visible(model_infos, request[KEY])


def _json(content: object) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")
