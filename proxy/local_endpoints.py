"""Endpoints that no instance answers: what the proxy knows itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from aiohttp import web

from proxy.auth.api_keys import KEY, LIVE, client_models, visible_client
from proxy.batch.batch_queue import BatchQueue
from proxy.errors import Unavailable
from proxy.forward.client_response import error_response
from proxy.headers import HOP
from proxy.json_response import json_response
from proxy.metrics import models_endpoint
from proxy.metrics.prometheus import Metrics
from proxy.metrics.slots_endpoint import engine_list, engine_slot, has_idle, overview
from proxy.models import ModelInfo, ModelLoader, ModelNames, with_variants
from proxy.prompt_cache.prefix_digest import PREFIXES
from proxy.router.router import Router
from proxy.routes import PATH_ID, Routes


class LocalEndpoints:
    def __init__(
        self,
        router: Router,
        loader: ModelLoader,
        metrics: Metrics,
        batch_queue: BatchQueue,
        *,
        has_keys: bool,
        loads_for_others: bool,
    ) -> None:
        self._loads_for_others = loads_for_others
        self._batch_queue = batch_queue
        self._has_keys = has_keys
        self._router = router
        self._loader = loader
        self._metrics = metrics

    def add_routes(self, routes: Routes) -> None:
        for path in ("/health", "/v1/health"):
            routes.add(path, get=self.health)
        routes.add(LIVE, get=self.live)
        for path in ("/models", "/v1/models"):
            routes.add(path, get=self.models)
            routes.add(path + "/{id}", get=self.model)
        routes.add("/slots", get=self.slots)
        routes.add("/slots/{id}", get=self.slot)
        routes.add("/corral/v1/slots", get=self.overview)
        routes.add("/corral/v1/batch", get=self.batch)
        routes.add(PREFIXES, get=self.prefixes)
        routes.add("/metrics", get=self.metrics)

    async def health(self, request: web.BaseRequest) -> web.Response:
        model_infos = self._loader.models()
        if sick := models_endpoint.unavailable_reason(model_infos):
            return error_response(request.path, sick)
        if self._has_keys and request[KEY] is None:
            return json_response(dict(models_endpoint.HEALTHY))
        return json_response(models_endpoint.health(model_infos, self._router.instances()))

    async def live(self, _: web.BaseRequest) -> web.Response:
        """Say that requests are answered, whatever becomes of the models."""
        return json_response(dict(models_endpoint.HEALTHY))

    async def models(self, request: web.BaseRequest) -> web.Response:
        listed = with_variants(self._model_infos(request))
        if self._loads_for_others and HOP in request.headers:
            listed = [replace(one, is_loadable=one.state == "unloaded") for one in listed]
        for_codex = "client_version" in request.query  # Codex alone says its version there
        return json_response(models_endpoint.model_list(listed, for_codex=for_codex))

    async def model(self, request: web.BaseRequest) -> web.Response:
        names = ModelNames(with_variants(self._model_infos(request)))
        return json_response(models_endpoint.model_json(names.resolve(request[PATH_ID]).model_info))

    async def slots(self, request: web.BaseRequest) -> web.Response:
        listed = self._listed(request)
        if "fail_on_no_slot" in request.query and not has_idle(listed):
            raise Unavailable("no slot is free; retry later")
        return json_response(listed)

    async def slot(self, request: web.BaseRequest) -> web.Response:
        return json_response(engine_slot(self._listed(request), request[PATH_ID]))

    def _listed(self, request: web.BaseRequest) -> list[dict[str, object]]:
        """`/slots` of the model and the instance in the query, where it names them."""
        listed = engine_list(self._router.instances(), self._named(request), time.monotonic())
        name = request.query.get("instance")
        return [slot for slot in listed if name in {None, slot["instance"]}]

    async def overview(self, request: web.BaseRequest) -> web.Response:
        model_infos, passes = self._named(request), await self._metrics.passes(self._router)
        instances, queues = self._router.instances(), self._router.queues()
        return json_response(overview(instances, queues, model_infos, time.monotonic(), passes))

    async def batch(self, request: web.BaseRequest) -> web.Response:
        stats, waiting = self._batch_queue.stats(), self._batch_queue.waiting()
        shown = [one.id for one in self._named(request) if one.id in stats]
        models = {name: {"waiting": waiting[name], **asdict(stats[name])} for name in shown}
        return json_response({"config": self._batch_queue.config, "models": models})

    async def prefixes(self, request: web.BaseRequest) -> web.Response:
        """What the caches hold of the client's prompts, after the cursor in the query."""
        key, models = request[KEY], [one.id for one in self._model_infos(request)]
        cursor = request.query.get("after", "")
        digest = self._router.prefix_digest(cursor, key.name if key else None, models)
        if digest is None:
            return web.Response(status=204)
        return web.Response(body=digest.encoded, content_type="application/json")

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        accept = ",".join(request.headers.getall("Accept", ()))
        body, content_type = await self._metrics.render(
            accept, self._model_infos(request), self._router, visible_client(request)
        )
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _model_infos(self, request: web.BaseRequest) -> Sequence[ModelInfo]:
        return client_models(self._loader, request)

    def _named(self, request: web.BaseRequest) -> Sequence[ModelInfo]:
        """The model in the query; without one, all that the client may see."""
        model_infos = self._model_infos(request)
        name = request.query.get("model")
        return [ModelNames(model_infos).resolve(name).model_info] if name else model_infos
