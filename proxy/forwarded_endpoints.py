"""Endpoints that an instance answers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import web

from proxy.access_log import CLIENT_GONE
from proxy.auth.access import BATCH_COMPLETIONS
from proxy.auth.api_keys import client_models, visible_client
from proxy.batch.batch_queue import gathers
from proxy.batch.completions import BatchCompletions
from proxy.batch.result_writer import PlainWriter
from proxy.body.bodies import Bodies, Share
from proxy.endpoints import ENDPOINTS, EndpointKind
from proxy.errors import BadRequest, NotLoaded, ProxyError
from proxy.fallback import Fallback, is_refused
from proxy.forward import lora_adapters, props
from proxy.forward.client_response import ClientResponse
from proxy.forward.forward import Forward
from proxy.forward.lora_adapters import LoraAdaptersResponse
from proxy.forward.props import NOTHING, ROUTER, PropsResponse, Remembered, router_page
from proxy.generate import sampling
from proxy.generate.translated import TRANSLATED, TranslatedResponse
from proxy.headers import RESPONSE_HEADERS
from proxy.json_response import json_response
from proxy.metrics.prometheus import Metrics
from proxy.middleware import ACCESS_RECORD
from proxy.models import ModelInfo, ModelLoader, ModelNames, PromptWarmer
from proxy.prompt_cache.shared_prefixes import SharedPrefixes
from proxy.request import ProxyRequest, Translation, client_names, client_of, read_request
from proxy.responses.stored_turn import StoredTurn
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.router.open_request import OpenRequest
from proxy.routes import Routes

_Serve = Callable[[web.BaseRequest, ClientResponse, Share, ModelNames], Awaitable[None]]

_CHAT: Final = Translation("/v1/chat/completions", EndpointKind.CHAT, lambda members: members)


class ForwardedEndpoints:
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
        routes.add(lora_adapters.PATH, get=self.lora_adapters)
        for path in ENDPOINTS["POST"]:
            routes.add(path, post=functools.partial(self.served_by, self.serve))
        routes.add(BATCH_COMPLETIONS, post=functools.partial(self.served_by, self._batches.serve))
        generate = functools.partial(
            self._batches.serve,
            read_batch=sampling.read_batch,
            make_writer=lambda _, response: PlainWriter(response),
        )
        routes.add("/batch/generate", post=functools.partial(self.served_by, generate))
        for path, response in TRANSLATED.items():
            routes.add(path, post=functools.partial(self.translated, response))

    async def props(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer `/props`, from memory where its model is not loaded."""
        names, name = client_names(self._loader, request), request.query.get("model")
        if name or len(names.model_infos) == 1:
            return await self._props_of(request, names.resolve(name).model_info.id)
        try:
            model = names.resolve(None).model_info.id
            return await self._props_of(request, model, ROUTER)
        except (BadRequest, NotLoaded):
            request[ACCESS_RECORD].model = None  # a page of our own is not counted
            return json_response(router_page(len(names.model_infos)))

    async def _props_of(
        self, request: web.BaseRequest, model: str, added: Mapping[str, object] = NOTHING
    ) -> web.StreamResponse:
        answer = PropsResponse(request, request[ACCESS_RECORD], added)
        try:
            response = await self.answered(request, answer, self.serve)
        except NotLoaded:
            found = self._remembered.page(self._model_info(request, model), added)
            if found is None:
                raise
            answer.record.model = None  # a page of our own is not counted
            return found
        if answer.page:
            known = [one.id for one in self._loader.models()]
            self._remembered.keep(self._model_info(request, model), answer.page, known)
        return response

    def _model_info(self, request: web.BaseRequest, model: str) -> ModelInfo:
        """A model as it is now; raises UnknownModel where a reload removed it."""
        return ModelNames(client_models(self._loader, request)).resolve(model).model_info

    async def lora_adapters(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = LoraAdaptersResponse(request, request[ACCESS_RECORD])
        return await self.answered(request, answer, self.serve)

    async def served_by(self, serve: _Serve, request: web.BaseRequest) -> web.StreamResponse:
        return await self.answered(request, ClientResponse(request, request[ACCESS_RECORD]), serve)

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a chat at another path than OpenAI's."""
        serve = functools.partial(self.serve, translation=_CHAT)
        return await self.served_by(serve, request)

    async def translated(
        self, response: type[TranslatedResponse], request: web.BaseRequest
    ) -> web.StreamResponse:
        answer = response(request, request[ACCESS_RECORD])
        serve = functools.partial(self.serve, translation=answer.translation())
        return await self.answered(request, answer, serve)

    async def answered(
        self, request: web.BaseRequest, answer: ClientResponse, serve: _Serve
    ) -> web.StreamResponse:
        try:
            client = client_of(request)
            answer.record.client, answer.record.path = client, request.path
            shares = self._bodies.settings.share_caches == "all"
            answer.record.hides_others = shares and visible_client(request) is not None
            body = self._bodies.share(client)
            in_flight = InFlightRequest(
                self._server_state.in_flight, OpenRequest(answer.record, client, request.path)
            )
            with in_flight, self._metrics.counting(answer.record), body as share:
                await serve(request, answer, share, client_names(self._loader, request))
        except ConnectionError:  # the client's: an instance's is an UpstreamFailed by now
            answer.record.status = CLIENT_GONE
        except ProxyError as error:
            if not answer.has_begun:
                raise
            answer.record.fail(error)
            await answer.abort(error)
        return answer.response

    async def serve(  # noqa: PLR0913 (those by name are for one API each)
        self,
        request: web.BaseRequest,
        answer: ClientResponse,
        share: Share,
        names: ModelNames,
        *,
        translation: Translation | None = None,
        turn: StoredTurn | None = None,
        read: ProxyRequest | None = None,
    ) -> None:
        """Answer a request; `read` is one whose body was read already."""
        record = answer.record
        proxy_request = read or await read_request(
            request, record.request_id, names, share, translation
        )
        record.model, record.kind = proxy_request.model, proxy_request.kind
        record.priority, record.is_stream = proxy_request.priority, proxy_request.is_stream
        if record.trace:
            record.trace.pass_on(proxy_request.headers)
        if proxy_request.wait_s is not None:
            request[RESPONSE_HEADERS]["Preference-Applied"] = f"wait={proxy_request.wait_s:g}"
        if gathers(proxy_request):
            await self._batches.queue.gather(proxy_request.model, proxy_request.client)
        try:
            await self._forward.handle(proxy_request, answer.writer(), turn)
        except ProxyError as error:
            if is_refused(request.headers):
                raise
            fallback = Fallback(self._forward, names, share, answer)
            proxy_request = await fallback.send(proxy_request, error, turn)
        if record.status == HTTPStatus.OK:
            self._learn(proxy_request)

    def _learn(self, request: ProxyRequest) -> None:
        """Learn a shared prefix, if that is enabled."""
        if self._warmer is None or not self._warmer.learns(request.model):
            return
        if request.owner.is_alone:  # what is learned serves all
            return
        if prefix := self._shared_prefixes.observe(
            request.model, request.kind, request.json, request.prompt
        ):
            self._warmer.learn(request.model, prefix)
