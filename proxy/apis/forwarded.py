"""Endpoints that an instance answers: completions, embeddings, and stored responses.

A chat whose model cannot be served is answered by the next model of its `fallback`.
`/v1/responses` continues, shows and deletes stored responses.

Source: OpenAI's API reference, "Get a model response", "Delete a model response", "List input
items".
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.apis import llama_server
from proxy.apis.batch_completions import BatchCompletions
from proxy.apis.generate import TRANSLATED, Translate, read_batch, tokenize_batch
from proxy.apis.llama_server import NOTHING, PAGE_MAX_BYTES, Rewritten, without_paths
from proxy.auth.access import BATCH_COMPLETIONS, BATCH_TOKENIZE
from proxy.auth.api_keys import KEY
from proxy.batches.records import limit_of, order_of, page_object
from proxy.cache.shared_prefixes import SharedPrefixes
from proxy.common.headers import EVENT_STREAM, EXPLAIN, FALLBACK, RESPONSE_HEADERS, TOOL_CALLS
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest, NotFound, NotLoaded, ProxyError, quote
from proxy.forward.forward import Forward
from proxy.forward.inspection import Explained
from proxy.forward.response import ClientResponse, StreamTransform
from proxy.http.api_formats import ApiFormat
from proxy.http.body import Share
from proxy.http.middleware import ACCESS_RECORD, PATH_ID, Routes, json_response
from proxy.observe.record import CLIENT_GONE, InFlightRequest
from proxy.request.engine_members import engine_members
from proxy.request.models import ModelInfo, ModelNames, PromptWarmer, client_models, client_names
from proxy.request.request import (
    ProxyRequest,
    Translation,
    encode_members,
    json_request,
    read_request,
)
from proxy.request.stored_responses import ResponseStore, StoredResponse, StoredTurn
from proxy.request.variants import MEMBER
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import ENDPOINTS, EndpointKind, endpoint_kind

_Serve = Callable[[web.BaseRequest, ClientResponse, Share, ModelNames], Awaitable[None]]

_CHATS: Final = frozenset({EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES})
_CHAT: Final = Translation("/v1/chat/completions", EndpointKind.CHAT, lambda members: members)


class ForwardedEndpoints(Feature):
    def __init__(
        self, core: Core, forward: Forward, batches: BatchCompletions, warmer: PromptWarmer | None
    ) -> None:
        self._core = core
        self._loader = core.loader
        self._batches = batches
        self._forward = forward
        self._warmer = warmer
        self._shared_prefixes = SharedPrefixes()
        self._remembered = llama_server.Remembered()

    def add_routes(self, routes: Routes) -> None:
        routes.add(llama_server.PROPS, get=self.props)
        routes.add(llama_server.LORA_ADAPTERS, get=self.lora_adapters)
        control = functools.partial(llama_server.control_completion, self._core)
        routes.add(llama_server.COMPLETION_CONTROL, post=control)
        batches = self._batches
        generate = functools.partial(batches.serve, read_batch=read_batch, is_plain=True)
        served: dict[str, _Serve] = {
            **dict.fromkeys(ENDPOINTS["POST"], self.serve),
            BATCH_COMPLETIONS: batches.serve,
            "/batch/generate": generate,
            BATCH_TOKENIZE: functools.partial(tokenize_batch, batches.own),
        }
        for path, serve in served.items():
            routes.add(path, post=functools.partial(self.answer, serve))
        for path, translate in TRANSLATED.items():
            routes.add(path, post=functools.partial(self._serve_translated, translate))

    async def props(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer `/props`, from memory if its model is not loaded."""
        names, name = client_names(self._loader, request), request.query.get("model")
        if name or len(names.model_infos) == 1:
            return await self._props_of(request, names.resolve(name).model_info.id)
        try:
            model = names.resolve(None).model_info.id
            return await self._props_of(request, model, llama_server.ROUTER)
        except (BadRequest, NotLoaded):
            request[ACCESS_RECORD].model = None  # our own pages are not counted
            return json_response(llama_server.router_page(len(names.model_infos)))

    async def _props_of(
        self, request: web.BaseRequest, model: str, added: Mapping[str, object] = NOTHING
    ) -> web.StreamResponse:
        def rewrite(body: bytes) -> bytes:
            page = without_paths(body)
            if not page.startswith(b"{"):
                return page
            known = [model_info.id for model_info in self._loader.models()]
            self._remembered.keep(self._model_info(request, model), page, known)
            return orjson.dumps({**orjson.loads(page), **added}) if added else page

        try:
            return await self.answer(self.serve, request, Rewritten(rewrite, PAGE_MAX_BYTES))
        except NotLoaded:
            found = self._remembered.page(self._model_info(request, model), added)
            if found is None:
                raise
            request[ACCESS_RECORD].model = None  # our own pages are not counted
            return found

    def _model_info(self, request: web.BaseRequest, model: str) -> ModelInfo:
        """Return the current state of a model; raises UnknownModel if a reload removed it."""
        return ModelNames(client_models(self._loader, request)).resolve(model).model_info

    async def lora_adapters(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self.answer(self.serve, request, Rewritten(without_paths, PAGE_MAX_BYTES))

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self.answer(functools.partial(self.serve, translation=_CHAT), request)

    async def _serve_translated(
        self, translate: Translate, request: web.BaseRequest
    ) -> web.StreamResponse:
        translation, transform = translate()
        serve = functools.partial(self.serve, translation=translation)
        return await self.answer(serve, request, transform)

    async def answer(
        self,
        serve: _Serve,
        request: web.BaseRequest,
        *transforms: StreamTransform,
        api: ApiFormat | None = None,
    ) -> web.StreamResponse:
        """Answer a request with what `serve` sends, through `transforms`.

        `api` is the format of the response; None for the format of the path.
        """
        answer = ClientResponse(request, request[ACCESS_RECORD], *transforms, api=api)
        try:
            core, record, key = self._core, answer.record, request[KEY]
            record.client = client = key.name if key else request.remote or ""
            record.path = request.path
            shares = core.settings.share_caches == "all"
            record.hides_others = shares and key is not None and not key.admin
            in_flight = InFlightRequest(core.server_state.in_flight, record, is_listed=True)
            with in_flight, Share(core.bodies, client) as share:
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
        record.rules = proxy_request.rules
        if record.trace:
            record.trace.pass_on(proxy_request.headers)
        if proxy_request.wait_s is not None:
            request[RESPONSE_HEADERS]["Preference-Applied"] = f"wait={proxy_request.wait_s:g}"
        if record.priority == "batch" and proxy_request.gathers:
            await self._batches.queue.gather(proxy_request.model, proxy_request.client)
        others = None
        asked = names.get(proxy_request.model)
        has_fallback = asked and asked.model_info.fallback
        if "tools" in proxy_request.json and asked:
            proxy_request.call_retries = _call_retries(request, asked.model_info)
        if has_fallback and request.headers.get(FALLBACK, "").strip().lower() != "none":
            others = other_requests(proxy_request, names, share, answer)
        if EXPLAIN in request.headers and answer.api.stream_type == EVENT_STREAM:
            answer.add(Explained(record))
        proxy_request = await self._forward.handle(proxy_request, answer, turn, others)
        if self._warmer and record.status == 200:
            self._learn(proxy_request, self._warmer)

    def _learn(self, request: ProxyRequest, warmer: PromptWarmer) -> None:
        # A learned prefix would be shared with other owners.
        if request.owner.is_alone or not warmer.learns(request.model):
            return
        if prefix := self._shared_prefixes.observe(
            request.model, request.kind, request.json, request.prompt
        ):
            warmer.learn(request.model, prefix)


def _call_retries(request: web.BaseRequest, model_info: ModelInfo) -> int | None:
    given = request.headers.get(TOOL_CALLS, "").strip().lower()
    if given not in {"", "repair", "pass"}:
        raise BadRequest(f"{TOOL_CALLS} is {quote(given)}; it may be `repair` or `pass`")
    if given == "repair" or (model_info.repairs_tool_calls and given != "pass"):
        return model_info.tool_call_retries
    return None


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
    other = json_request(body, request.kind, None, names, settings, request.owner)
    return replace(request, **{member: getattr(other, member) for member in _OF_BODY})


# The members of a request that come from its body.
_OF_BODY: Final = (
    "model", "body", "json", "prompt", "slots", "remote_variant", "adapter", "keep_alive_s",
)  # fmt: skip


class ResponsesEndpoint(Feature):
    """Answers the endpoints; a client sees only the responses of its own API key."""

    def __init__(self, forwarded: ForwardedEndpoints, store: ResponseStore) -> None:
        self._forwarded = forwarded
        self._store = store

    def add_routes(self, routes: Routes) -> None:
        for path in ("/v1/responses", "/responses"):
            for posted in (path, path + "/input_tokens"):
                routes.add(posted, post=self.create)
            routes.add(path + "/{id}/input_items", get=self.list_input_items)
            routes.add(path + "/{id}", get=self.show, delete=self.delete)

    async def create(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._forwarded.answer(self._serve, request)

    async def show(self, request: web.BaseRequest) -> web.Response:
        if request.query.get("stream") == "true":
            raise BadRequest("a stored response cannot be streamed again; leave out stream")
        response = self._find(request).response
        return web.Response(body=response, content_type="application/json")

    async def list_input_items(self, request: web.BaseRequest) -> web.Response:
        limit = limit_of(request.query, 20, 100)
        items = self._find(request).input_items()
        if order_of(request.query) == "desc":
            items.reverse()
        if after := request.query.get("after"):
            ids = [item.get("id") for item in items]
            if after not in ids:
                raise BadRequest(f"after: no input item of this response has id {quote(after)}")
            items = items[ids.index(after) + 1 :]
        return json_response(page_object(items, items[:limit]))

    async def delete(self, request: web.BaseRequest) -> web.Response:
        stored = self._find(request)
        self._store.delete(_owner(request), stored.id)
        return json_response({"id": stored.id, "object": "response", "deleted": True})

    async def _serve(
        self, request: web.BaseRequest, answer: ClientResponse, share: Share, names: ModelNames
    ) -> None:
        self._store.trim()
        turn = StoredTurn(self._store, _owner(request), share.settings.max_body_bytes)
        kind = endpoint_kind("POST", request.path)

        def translate(given: dict[str, Any]) -> dict[str, Any]:
            members = turn.members(given)
            return members if kind is EndpointKind.RESPONSES else engine_members(members)

        translation = Translation(request.path, kind, translate, turn.size_bytes)
        await self._forwarded.serve(
            request, answer, share, names, translation=translation, turn=turn
        )

    def _find(self, request: web.BaseRequest) -> StoredResponse:
        response_id = request[PATH_ID]
        if stored := self._store.find(_owner(request), response_id):
            return stored
        hint = "" if self._store.settings.enabled else _OFF
        raise NotFound(f"Response with id {quote(response_id)} not found.{hint}")


_OFF: Final = " Stored responses are off; set enabled = true under [proxy.stored_responses]."


def _owner(request: web.BaseRequest) -> str:
    key = request[KEY]
    return key.name if key else ""
