"""`/health`, `/v1/models`, and the endpoints of slots, batches, prefixes, metrics and warming.

An entry of the list of models has OpenAI's and Anthropic's members, and those that editors and chat
clients read from local servers; no client library rejects the others' members.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web
from prometheus_client import Metric

from proxy.auth.access import PREFIXES
from proxy.auth.api_keys import KEY, LIVE, visible_client
from proxy.cache.miss_cause import client_hash
from proxy.cache.prompt import BLOCK_TOKENS, Prompt, read_prompt
from proxy.common.headers import HOP
from proxy.endpoints.feature import Core, Feature
from proxy.endpoints.slots import engine_list, engine_slot, has_idle, overview
from proxy.errors import (
    Forbidden,
    ModelLoading,
    NoModelServes,
    ProxyError,
    TooManyRequests,
    Unavailable,
)
from proxy.http.api_formats import error_response
from proxy.http.body import Share, read_members
from proxy.http.middleware import ACCESS_RECORD, PATH_ID, Routes, json_response
from proxy.observe.record import InFlightRequest
from proxy.request.limits import check
from proxy.request.models import (
    ModelInfo,
    ModelNames,
    PromptWarmer,
    ResolvedModel,
    client_models,
    with_variants,
)
from proxy.request.request import cache_owner, client_of
from proxy.request.variants import with_adapter
from proxy.router.batch_queue import BatchQueue, metrics_of
from proxy.router.lease import InstanceStats, SlotUse, Tokens
from proxy.upstream.endpoint_kinds import EndpointKind

HEALTHY: Final = MappingProxyType({"status": "ok"})
_STATES: Final = ("loaded", "loading", "unloaded", "failed")


def unavailable_reason(model_infos: Sequence[ModelInfo]) -> ProxyError | None:
    """Return why no model can be served; None if one can.

    It is readable without a key, so it has counts but no causes, which name files, flags and engine
    messages.
    """
    states = Counter[str](model_info.state for model_info in model_infos)
    if states["loaded"] or states["unloaded"]:
        return None
    if loading := states["loading"]:
        return ModelLoading(f"no model is loaded yet; {loading} of {len(model_infos)} loading")
    if not model_infos:
        return NoModelServes("no model is configured")
    failed = f"{states['failed']} of {len(model_infos)} failed"
    return NoModelServes(f"no model can be served, {failed}; see `corral status` on this machine")


def health(
    model_infos: Sequence[ModelInfo], instances: Sequence[InstanceStats]
) -> dict[str, object]:
    """Return `/health` of a proxy that can serve: models by state, slots by use."""
    states = Counter[str](model_info.state for model_info in model_infos)
    in_service = [instance for instance in instances if instance.in_service]
    busy = sum(len(instance.leases) for instance in in_service)
    return {
        **HEALTHY,
        "models": {state: states[state] for state in _STATES},
        "slots_idle": sum(instance.upstream.slots for instance in in_service) - busy,
        "slots_processing": busy,
    }


def model_list(model_infos: Sequence[ModelInfo], *, for_codex: bool = False) -> dict[str, object]:
    """Return `/v1/models`: every configured model, loaded or not.

    Codex rejects a list without `models`, and entries that lack any of its two dozen members;
    without entries it uses its built-in list.
    """
    return {
        "object": "list",
        "data": [model_json(model_info) for model_info in model_infos],
        "models": [] if for_codex else [_ollama_json(model_info) for model_info in model_infos],
        # Anthropic's clients paginate; this is the last page.
        "has_more": False,
        "first_id": model_infos[0].id if model_infos else None,
        "last_id": model_infos[-1].id if model_infos else None,
    }


def model_json(model_info: ModelInfo) -> dict[str, object]:
    """Return `/v1/models/{id}`."""
    has_failed = model_info.state == "failed"
    return {
        # OpenAI's.
        "id": model_info.id,
        "object": "model",
        "created": model_info.created,
        "owned_by": "llama-corral",
        # Anthropic's.
        "type": "model",
        "display_name": model_info.id,
        "created_at": datetime.fromtimestamp(model_info.created, tz=UTC).isoformat(),
        "max_input_tokens": model_info.context_length,
        # Read from local servers.
        "aliases": list(model_info.aliases),
        "context_length": model_info.context_length,
        "variant_of": model_info.variant_of,
        "meta": {**model_info.meta, "n_ctx": model_info.context_length, "slots": model_info.slots},
        "status": {
            # Open WebUI and Jan know three states.
            "value": "unloaded" if has_failed else model_info.state,
            "failed": has_failed,
            "reason": model_info.reason,
            **({"loadable": True} if model_info.is_loadable else {}),
        },
        # Further members of llama-server's router mode.
        "architecture": {
            "input_modalities": list(model_info.input_modalities),
            "output_modalities": ["text"],
        },
        "tags": [],
        "source": "preset",
        "can_remove": False,
    }


def _ollama_json(model_info: ModelInfo) -> dict[str, object]:
    """Return an entry of Ollama's list in llama-server's form; unknown members are empty.

    llama.vscode reads its list in place of OpenAI's, by `name` and `id`. Source: build 10434,
    `get_models` of tools/server/server-context.cpp; Ollama's API reference, list local models.
    """
    meta, has_more = model_info.meta, len(model_info.input_modalities) > 1
    return {
        "name": model_info.id,
        "model": model_info.id,
        "id": model_info.id,
        "modified_at": "",
        "size": meta.get("size", ""),
        "digest": "",
        "type": "model",
        "description": "",
        "context_length": model_info.context_length,
        "tags": [""],
        "capabilities": ["completion", *(["multimodal"] if has_more else [])],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": parameter_size(meta.get("n_params")),
            "quantization_level": meta.get("ftype", ""),
        },
    }


def parameter_size(count: int | str | None) -> str:
    """Return a parameter count in Ollama's form, such as 134.52M or 8.0B."""
    if not isinstance(count, int):
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


class LocalEndpoints(Feature):
    def __init__(self, core: Core, batch_queue: BatchQueue) -> None:
        self._core = core
        self._router = core.router
        self._batch_queue = batch_queue

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
        routes.add("/metrics", get=self.scrape)

    def metrics(self) -> Iterator[Metric]:
        return metrics_of(self._batch_queue.stats())

    async def health(self, request: web.BaseRequest) -> web.Response:
        model_infos = self._core.loader.models()
        if sick := unavailable_reason(model_infos):
            return error_response(request.path, sick)
        if self._core.keys.are_needed and request[KEY] is None:
            return json_response(dict(HEALTHY))
        return json_response(health(model_infos, self._router.instances()))

    async def live(self, _: web.BaseRequest) -> web.Response:
        """Answer that the proxy is alive, in any state of the models."""
        return json_response(dict(HEALTHY))

    async def models(self, request: web.BaseRequest) -> web.Response:
        listed = with_variants(self._model_infos(request))
        is_for_node = HOP in request.headers and self._core.settings.load_for_others == "idle"
        if is_for_node:
            listed = [replace(model, is_loadable=model.state == "unloaded") for model in listed]
        for_codex = "client_version" in request.query  # only Codex sends its version there
        return json_response(model_list(listed, for_codex=for_codex))

    async def model(self, request: web.BaseRequest) -> web.Response:
        names = ModelNames(with_variants(self._model_infos(request)))
        return json_response(model_json(names.resolve(request[PATH_ID]).model_info))

    async def slots(self, request: web.BaseRequest) -> web.Response:
        listed = self._listed(request)
        if "fail_on_no_slot" in request.query and not has_idle(listed):
            raise Unavailable("no slot is free; retry later")
        return json_response(listed)

    async def slot(self, request: web.BaseRequest) -> web.Response:
        return json_response(engine_slot(self._listed(request), request[PATH_ID]))

    def _listed(self, request: web.BaseRequest) -> list[dict[str, object]]:
        listed = engine_list(
            self._router.instances(), self._models_of_query(request), time.monotonic()
        )
        name = request.query.get("instance")
        return [slot for slot in listed if name in {None, slot["instance"]}]

    async def overview(self, request: web.BaseRequest) -> web.Response:
        model_infos = self._models_of_query(request)
        passes = await self._core.metrics.passes(self._router)
        instances, queues = self._router.instances(), self._router.queues.stats()
        return json_response(overview(instances, queues, model_infos, time.monotonic(), passes))

    async def batch(self, request: web.BaseRequest) -> web.Response:
        stats, waiting = self._batch_queue.stats(), self._batch_queue.waiting()
        shown = [model.id for model in self._models_of_query(request) if model.id in stats]
        models = {name: {"waiting": waiting[name], **asdict(stats[name])} for name in shown}
        return json_response({"config": self._batch_queue.config, "models": models})

    async def prefixes(self, request: web.BaseRequest) -> web.Response:
        """Answer with the cached prefixes of the client's prompts after the query's cursor."""
        key, models = request[KEY], [model.id for model in self._model_infos(request)]
        cursor = request.query.get("after", "")
        digest = self._router.cache.digests.after(cursor, key.name if key else None, models)
        if digest is None:
            return web.Response(status=204)
        return web.Response(body=digest.to_bytes(), content_type="application/json")

    async def scrape(self, request: web.BaseRequest) -> web.Response:
        body, content_type = await self._core.metrics.render(
            ",".join(request.headers.getall("Accept", ())),
            self._model_infos(request),
            self._router,
            self._core.server_state.in_flight,
            visible_client(request),
        )
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _model_infos(self, request: web.BaseRequest) -> Sequence[ModelInfo]:
        return client_models(self._core.loader, request)

    def _models_of_query(self, request: web.BaseRequest) -> Sequence[ModelInfo]:
        model_infos = self._model_infos(request)
        name = request.query.get("model")
        return [ModelNames(model_infos).resolve(name).model_info] if name else model_infos


_RETRY_AFTER_S: Final = 5


class WarmEndpoint(Feature):
    """Prefills a prompt, given as a chat request.

    It loads no model, reaches no other machine, and changes only caches. One prompt at a time is
    prefilled per model, while no client needs its instances; it stops if its client disconnects.
    """

    def __init__(self, core: Core, warmer: PromptWarmer) -> None:
        self._core = core
        self._warmer = warmer
        self._prefilling: set[str] = set()

    def add_routes(self, routes: Routes) -> None:
        routes.add("/corral/v1/models/{id}/warm", post=self.answer)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer with the tokens that each instance prefilled.

        Raises:
            UnknownModel: No model here has the name.
            LimitExceeded: The prompt exceeds the limits of an engine.
            TooManyRequests: A prompt is already being prefilled for the model, or the key has used
                up its tokens.
            ContextTooLong: The prompt is longer than the key permits.
            ProxyError: See `PromptWarmer.warm` and `read_body`.
        """
        key = request[KEY]
        names = self._core.loader.names().local.visible(key.models if key else None)
        pick = names.resolve(request[PATH_ID])
        in_flight = InFlightRequest(self._core.server_state.in_flight)
        with in_flight, self._core.bodies.share(client_of(request)) as share:
            return await self._read(request, pick, share)

    async def _read(
        self, request: web.BaseRequest, pick: ResolvedModel, share: Share
    ) -> web.Response:
        members = await read_members(request, share)
        if pick.variant:
            members = pick.variant.apply_to(members)
        if adapters := pick.model_info.adapters:
            members = with_adapter(members, adapters, pick.adapter)
        check(EndpointKind.CHAT, members, share.settings.limits)
        model = pick.model_info.id
        if model in self._prefilling:
            message = f"{model} is already prefilling a prompt; retry later"
            raise TooManyRequests(message, _RETRY_AFTER_S)
        client, prompt = client_of(request), read_prompt(EndpointKind.CHAT, model, members)
        if cache_owner(request, share.settings).is_alone:
            raise Forbidden(
                'keys prefill no prompts where share_caches under [proxy] is "key": all keys '
                "could use them; send the prompt as a chat instead"
            )
        self._prefilling.add(model)
        try:
            with self._reserve_tokens(client, prompt, members):
                warmed = await self._warmer.warm(model, members)
        finally:
            self._prefilling.discard(model)
        for result in warmed:
            tokens = Tokens(result.tokens, result.cached_tokens, 1)
            self._core.router.charge(SlotUse(client, model, result.instance, tokens, 0.0))
        record = request[ACCESS_RECORD]
        record.client, record.path, record.model = client, request.path, model
        record.kind, record.priority, record.status = EndpointKind.CHAT, "batch", HTTPStatus.OK
        if prompt and visible_client(request) is not None:
            most = BLOCK_TOKENS * self._core.router.cache.recent.own_blocks(
                client_hash(model, client), prompt
            )
            warmed = [result.with_cached(most) for result in warmed]
        data = [
            {"instance": result.instance, "tokens": result.tokens, "cached": result.cached_tokens}
            for result in warmed
        ]
        return json_response({"data": data})

    def _reserve_tokens(
        self, client: str, prompt: Prompt | None, members: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        if (key := self._core.admission.keys.limited.get(client)) is None:
            return nullcontext()
        return self._core.admission.tokens.reserve(key, prompt.tokens if prompt else 0, members)
