"""Endpoints that an instance answers: completions, embeddings, and the control of a completion.

A chat whose model cannot be served is answered by the next model of its `fallback`.

`/v1/chat/completions/control` controls a completion that an instance is generating. Only its client
knows the id of a completion; the proxy does not read the ids in a stream. So every instance of the
model gets the request, and the one that generates the completion acts on it.

Source: llama-server, build 10434: the answer has `success`, false if no completion has the id.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.apis import generate as generate_module
from proxy.apis import llama_server
from proxy.apis.batch_completions import BatchCompletions, PlainWriter
from proxy.apis.generate import TRANSLATED, Translate
from proxy.apis.llama_server import (
    NOTHING,
    PAGE_MAX_BYTES,
    ROUTER,
    PropsPage,
    Remembered,
    Rewritten,
    adapters_without_paths,
    router_page,
)
from proxy.auth.access import BATCH_COMPLETIONS
from proxy.auth.api_keys import visible_client
from proxy.cache.shared_prefixes import SharedPrefixes
from proxy.common.headers import EVENT_STREAM, EXPLAIN, FALLBACK, JSON, RESPONSE_HEADERS
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest, NotLoaded, ProxyError
from proxy.forward.forward import Forward
from proxy.forward.inspection import Explained
from proxy.forward.node_request import for_node
from proxy.forward.response import ClientResponse
from proxy.forward.upstream_errors import reclassify_error
from proxy.http.api_formats import OPENAI
from proxy.http.body import Share, check_complexity, members_of, read_body
from proxy.http.middleware import ACCESS_RECORD, Routes, json_response
from proxy.observe.record import CLIENT_GONE, InFlightRequest, OpenRequest
from proxy.request.models import (
    ModelInfo,
    ModelNames,
    PromptWarmer,
    client_models,
    client_names,
)
from proxy.request.request import (
    ProxyRequest,
    Translation,
    client_of,
    encode_members,
    json_content,
    named_model,
    read_request,
)
from proxy.request.stored_responses import StoredTurn
from proxy.request.variants import MEMBER
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, UpstreamRequest, fetch
from proxy.upstream.endpoint_kinds import ENDPOINTS, EndpointKind, choices_of
from proxy.upstream.upstream import Upstream

PATH: Final = "/v1/chat/completions/control"
# An engine acts between two batches; a batch may take seconds.
_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 64 * 1024


class ControlEndpoint(Feature):
    def __init__(self, core: Core) -> None:
        self._core = core
        self._bodies = core.bodies

    def add_routes(self, routes: Routes) -> None:
        routes.add(PATH, post=self.answer)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Return the answer of the instance that acted, else of any instance.

        Raises:
            NotLoaded: No instance of the model runs.
            ProxyError: As `read_body` and `ModelNames.resolve` do, or no instance answered.
        """
        in_flight = InFlightRequest(self._core.server_state.in_flight)
        with in_flight, self._bodies.share(client_of(request)) as share:
            body = await read_body(request, share)
            await check_complexity(body, share)
            name = named_model(members_of(body)) or request.query.get("model")
            model = client_names(self._core.loader, request).resolve(name).model_info.id
            answers = await self._send(self._upstreams(model), body)
        answer = first_successful(answers)
        status, body = reclassify_error(answer.status, answer.body)
        if status >= HTTPStatus.BAD_REQUEST:
            body = OPENAI.engine_error(status, body)
        return web.Response(body=body, status=status, headers={"Content-Type": JSON})

    def _upstreams(self, model: str) -> list[Upstream]:
        found = [
            instance.upstream
            for instance in self._core.router.instances()
            if instance.upstream.model == model
        ]
        if not found:
            raise NotLoaded(f"{model} is not loaded, so it generates no completion")
        return found

    async def _send(self, upstreams: Sequence[Upstream], body: bytes) -> list[FetchedBody]:
        """Send to all at once; raises the error of one instance if none answers."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._fetch(upstream, body)) for upstream in upstreams]
        results = [task.result() for task in tasks]
        answers = [result for result in results if isinstance(result, FetchedBody)]
        if not answers:
            raise next(result for result in results if isinstance(result, ProxyError))
        return answers

    async def _fetch(self, upstream: Upstream, body: bytes) -> FetchedBody | ProxyError:
        headers = CIMultiDict({"Content-Type": "application/json"})
        request = UpstreamRequest("POST", PATH, "", headers, body)
        if upstream.node:
            request = for_node(request, upstream.node)
        try:
            return await fetch(upstream, request, self._bodies.settings, _TIMEOUT_S, _MAX_BYTES)
        except ProxyError as error:
            return error


def first_successful(answers: Iterable[FetchedBody]) -> FetchedBody:
    found = list(answers)
    return next((result for result in found if _is_success(result)), found[0])


def _is_success(answer: FetchedBody) -> bool:
    try:
        members = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return False
    return answer.status == 200 and isinstance(members, dict) and members.get("success") is True


_Serve = Callable[[web.BaseRequest, ClientResponse, Share, ModelNames], Awaitable[None]]

_CHATS: Final = frozenset({EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES})
_CHAT: Final = Translation("/v1/chat/completions", EndpointKind.CHAT, lambda members: members)


class ForwardedEndpoints(Feature):
    def __init__(
        self,
        core: Core,
        forward: Forward,
        batches: BatchCompletions,
        warmer: PromptWarmer | None,
    ) -> None:
        self._core = core
        self._loader = core.loader
        self._batches = batches
        self._forward = forward
        self._warmer = warmer
        self._shared_prefixes = SharedPrefixes()
        self._remembered = Remembered()

    def add_routes(self, routes: Routes) -> None:
        routes.add(llama_server.PROPS, get=self.props)
        routes.add(llama_server.LORA_ADAPTERS, get=self.lora_adapters)
        for path in ENDPOINTS["POST"]:
            routes.add(path, post=functools.partial(self.answer_with, self.serve))
        routes.add(BATCH_COMPLETIONS, post=functools.partial(self.answer_with, self._batches.serve))
        generate = functools.partial(
            self._batches.serve,
            read_batch=generate_module.read_batch,
            make_writer=lambda _, response: PlainWriter(response),
        )
        routes.add("/batch/generate", post=functools.partial(self.answer_with, generate))
        for path, translate in TRANSLATED.items():
            routes.add(path, post=functools.partial(self._serve_translated, translate))

    async def props(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer `/props`, from memory if its model is not loaded."""
        names, name = client_names(self._loader, request), request.query.get("model")
        if name or len(names.model_infos) == 1:
            return await self._props_of(request, names.resolve(name).model_info.id)
        try:
            model = names.resolve(None).model_info.id
            return await self._props_of(request, model, ROUTER)
        except (BadRequest, NotLoaded):
            request[ACCESS_RECORD].model = None  # our own pages are not counted
            return json_response(router_page(len(names.model_infos)))

    async def _props_of(
        self, request: web.BaseRequest, model: str, added: Mapping[str, object] = NOTHING
    ) -> web.StreamResponse:
        props = PropsPage(added)
        rewritten = Rewritten(props.rewrite, PAGE_MAX_BYTES)
        answer = ClientResponse(request, request[ACCESS_RECORD], rewritten)
        try:
            response = await self.serve_answer(request, answer, self.serve)
        except NotLoaded:
            found = self._remembered.page(self._model_info(request, model), added)
            if found is None:
                raise
            answer.record.model = None  # our own pages are not counted
            return found
        if props.page:
            known = [model.id for model in self._loader.models()]
            self._remembered.keep(self._model_info(request, model), props.page, known)
        return response

    def _model_info(self, request: web.BaseRequest, model: str) -> ModelInfo:
        """Return the current state of a model; raises UnknownModel if a reload removed it."""
        return ModelNames(client_models(self._loader, request)).resolve(model).model_info

    async def lora_adapters(self, request: web.BaseRequest) -> web.StreamResponse:
        rewritten = Rewritten(lambda _, body: adapters_without_paths(body), PAGE_MAX_BYTES)
        answer = ClientResponse(request, request[ACCESS_RECORD], rewritten)
        return await self.serve_answer(request, answer, self.serve)

    async def answer_with(self, serve: _Serve, request: web.BaseRequest) -> web.StreamResponse:
        return await self.serve_answer(
            request, ClientResponse(request, request[ACCESS_RECORD]), serve
        )

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        serve = functools.partial(self.serve, translation=_CHAT)
        return await self.answer_with(serve, request)

    async def _serve_translated(
        self, translate: Translate, request: web.BaseRequest
    ) -> web.StreamResponse:
        translation, transform = translate()
        answer = ClientResponse(request, request[ACCESS_RECORD], transform)
        serve = functools.partial(self.serve, translation=translation)
        return await self.serve_answer(request, answer, serve)

    async def serve_answer(
        self, request: web.BaseRequest, answer: ClientResponse, serve: _Serve
    ) -> web.StreamResponse:
        try:
            client = client_of(request)
            answer.record.client, answer.record.path = client, request.path
            shares = self._core.settings.share_caches == "all"
            answer.record.hides_others = shares and visible_client(request) is not None
            body = self._core.bodies.share(client)
            in_flight = InFlightRequest(
                self._core.server_state.in_flight, OpenRequest(answer.record, client, request.path)
            )
            with in_flight, self._core.metrics.counting(answer.record), body as share:
                await serve(request, answer, share, client_names(self._loader, request))
        except ConnectionError:  # the client left; an instance's error is an UpstreamFailed
            answer.record.status = CLIENT_GONE
        except ProxyError as error:
            if not answer.has_begun:
                raise
            answer.record.fail(error)
            await answer.abort(error)
        return answer.response

    async def serve(  # noqa: PLR0913 (each keyword argument is for one API)
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
        """Answer a request; `read` is the parsed request if its body was already read."""
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
        if proxy_request.gathers:
            await self._batches.queue.gather(proxy_request.model, proxy_request.client)
        others = None
        if request.headers.get(FALLBACK, "").strip().lower() != "none":
            others = other_requests(proxy_request, names, share, answer)
        explained = None
        if EXPLAIN in request.headers and answer.api.stream_type == EVENT_STREAM:
            explained = Explained(record)
        with answer.through(explained):
            proxy_request = await self._forward.handle(proxy_request, answer, turn, others)
        if record.status == HTTPStatus.OK:
            self._learn(proxy_request)

    def _learn(self, request: ProxyRequest) -> None:
        if self._warmer is None or not self._warmer.learns(request.model):
            return
        if request.owner.is_alone:  # a learned prefix would be shared with other owners
            return
        if prefix := self._shared_prefixes.observe(
            request.model, request.kind, request.json, request.prompt
        ):
            self._warmer.learn(request.model, prefix)


def other_requests(
    request: ProxyRequest, names: ModelNames, share: Share, answer: ClientResponse
) -> Iterator[Awaitable[ProxyRequest]]:
    """Yield the request for each model of the `fallback` that the client may use, each once.

    Only chats fall back: a raw prompt is written in the template or the tokens of its model, and
    vectors, ranks and token counts of two models cannot be compared. Only the list of the model
    that the client named counts, so two models may name each other. A request that another proxy
    forwarded does not fall back: the proxy that has the client decides.

    Awaiting a request raises BadRequest.
    """
    asked = names.get(request.model)
    if asked is None or request.is_from_proxy or request.kind not in _CHATS:
        return
    tried = {request.model}
    for name in asked.model_info.fallback:
        other = names.get(name)
        if other and other.model_info.id not in tried:
            tried.add(other.model_info.id)
            answer.note_fallback(request.model)
            translate = functools.partial(for_model, request, name, names, share.settings)
            yield share.run(len(request.body), translate)


def for_model(
    request: ProxyRequest, name: str, names: ModelNames, settings: ProxySettings
) -> ProxyRequest:
    """Return a request for the model or variant called `name`; raises BadRequest.

    Changes that a variant of the first model made to the request remain.
    """
    members = {**request.json, "model": name}
    if request.adapter is not None:  # it belongs to the first model
        members.pop(MEMBER)
    body = encode_members(members)
    content = json_content(body, request.kind, None, names, settings, request.owner)
    return replace(
        request,
        model=content.model,
        body=content.body,
        json=content.members,
        prompt=content.prompt,
        slots=choices_of(request.kind, content.members),
        remote_variant=content.remote_variant,
        adapter=content.adapter,
        keep_alive_s=content.keep_alive_s,
    )
