"""`/v1/gpu/warmup`, `/v1/gpu/status`, `/corral/v1/runtime`: the engine, and what is on GPUs.

A GPU here is a device that layers of a model are on. Where there is none, nothing is warm: a
warm-up has loaded the model all the same, and says where it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from proxy.auth.api_keys import KEY
from proxy.batch_config import BatchConfig
from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.errors import QueueTimeout
from proxy.generate.sampling import with_model
from proxy.json_response import json_response
from proxy.models import EngineReader, GpuUse, ModelLoader, ModelNames
from proxy.request import client_of, named_model
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.routes import Routes


class EngineEndpoints:
    def __init__(
        self, loader: ModelLoader, engine: EngineReader, server_state: ServerState, bodies: Bodies
    ) -> None:
        self._batch = bodies.settings.batch.config
        self._loader = loader
        self._engine = engine
        self._server_state = server_state
        self._bodies = bodies

    def add_routes(self, routes: Routes) -> None:
        routes.add("/v1/gpu/warmup", post=self.warmup)
        routes.add("/v1/gpu/status", get=self.status)
        routes.add("/corral/v1/runtime", get=self.runtime)

    async def warmup(self, request: web.BaseRequest) -> web.Response:
        """Load a model of this machine, and say what of it is on GPUs.

        Raises:
            BadRequest: There are several models, and the request names none.
            QueueTimeout: The model was not loaded in time.
            ProxyError: As `ModelLoader.ensure_ready` and `read_body` do.
        """
        in_flight = InFlightRequest(self._server_state.in_flight)
        with in_flight, self._bodies.share(client_of(request)) as share:
            members = await _members(request, share)
            name = named_model(with_model(members)) or request.query.get("model")
            model = self._names(request).resolve(name).model_info.id
            await self._load(model, share.settings.queue_timeout_s)
        return json_response(warmup_answer(model, self._engine.gpu_use(model)))

    async def status(self, request: web.BaseRequest) -> web.Response:
        infos = self._names(request).model_infos
        uses = [self._engine.gpu_use(info.id) for info in infos]
        return json_response(status_answer(uses, self._batch))

    async def runtime(self, _: web.BaseRequest) -> web.Response:
        return json_response(await self._engine.runtime())

    async def _load(self, model: str, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._loader.ensure_ready(model)
        except TimeoutError as error:
            message = f"timed out after {limit_s:g} s waiting for {model} to load; retry later"
            raise QueueTimeout(message) from error

    def _names(self, request: web.BaseRequest) -> ModelNames:
        key = request[KEY]
        return self._loader.names().local.visible(key.models if key else None)


def warmup_answer(model: str, use: GpuUse) -> dict[str, object]:
    return {
        "success": use.layers > 0,
        "memory_bytes": use.memory_bytes,
        "num_layers": use.layers,
        "message": _message(model, use),
    }


def status_answer(uses: Iterable[GpuUse], batch: BatchConfig) -> dict[str, object]:
    found = [use for use in uses if use.layers]
    return {
        "cache_ready": bool(found),
        "cache_memory_bytes": sum(use.memory_bytes for use in found),
        "batch_threshold": batch.gpu_threshold,
        "recommended_min_batch": batch.min_batch,
    }


def _message(model: str, use: GpuUse) -> str:
    if not use.layers:
        return f"{model} is loaded and runs on the CPU: no layer of it is on a GPU"
    memory = f"{use.memory_bytes / 1e9:.2f} GB"
    return f"{model} is loaded: {use.layers} layers on {', '.join(use.devices)}, {memory}"


async def _members(request: web.BaseRequest, share: Share) -> dict[str, Any]:
    """Read the body, which may be empty."""
    body = await read_body(request, share)
    if not body:
        return {}
    await check_complexity(body, share)
    return await share.run(len(body), lambda: members_of(body))
