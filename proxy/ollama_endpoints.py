"""Ollama's API: `/api/…`, and `/`, by which its clients tell that a server runs.

GET    /  /api/version  /api/tags  /api/ps
POST   /api/show  /api/chat  /api/generate  /api/embed  /api/embeddings  /api/pull
DELETE /api/delete
       /api/create  /api/copy  /api/push  /api/blobs/{digest}    are refused

Text and vectors are requests for an instance like all others: keys, queues, leases, caches and
fallbacks are the same.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.errors import NotServed, QueueTimeout
from proxy.forward.client_response import ClientResponse
from proxy.forwarded_endpoints import ForwardedEndpoints
from proxy.json_response import json_response
from proxy.keep_alive import keep_alive_s
from proxy.middleware import ACCESS_RECORD
from proxy.models import ModelLoader, ModelNames
from proxy.ollama import engine_request
from proxy.ollama.engine_request import EngineRequest, Translate
from proxy.ollama.files import ModelFiles
from proxy.ollama.host import OllamaHost
from proxy.ollama.lines import header
from proxy.ollama.lists import ModelLists
from proxy.ollama.names import given_name, untagged
from proxy.ollama.response import (
    ChatResponse,
    EmbeddingsResponse,
    EmbedResponse,
    GenerateResponse,
    OllamaResponse,
)
from proxy.request import cache_owner, json_content, request_of, written
from proxy.routes import Routes

# The API of this release: the first with `/v1/messages` beside `/v1/responses`. Clients compare it
# with the release that they need.
API_VERSION: Final = "0.14.0"
RUNNING: Final = "Ollama is running"
_NOT_SERVED: Final = MappingProxyType(
    {
        "/api/create": "a model is described in corral.toml; see `corral import` for a Modelfile",
        "/api/copy": "give a model another name by `aliases` in corral.toml",
        "/api/push": "models are not uploaded",
        "/api/blobs/{id}": "models come from files on this machine or by /api/pull",
    }
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as it was read; `request` is None for one that loads its model."""

    model: str
    is_local: bool
    given_model: str
    request: EngineRequest | None
    keep_alive_s: float | None


class OllamaEndpoints:
    def __init__(
        self,
        forwarded: ForwardedEndpoints,
        loader: ModelLoader,
        host: OllamaHost,
        bodies: Bodies,
    ) -> None:
        self._forwarded = forwarded
        self._loader = loader
        self._host = host
        self._lists = ModelLists(loader, host, bodies)
        self._files = ModelFiles(loader, host, bodies)

    def add_routes(self, routes: Routes) -> None:
        routes.add("/", get=self.root)
        routes.add("/api/version", get=self.version)
        routes.add("/api/tags", get=self._lists.tags)
        routes.add("/api/ps", get=self._lists.running)
        routes.add("/api/show", post=self._lists.show)
        text = self._handler
        routes.add("/api/chat", post=text(ChatResponse, engine_request.chat))
        routes.add("/api/generate", post=text(GenerateResponse, engine_request.generate))
        routes.add("/api/embed", post=text(EmbedResponse, engine_request.embed))
        routes.add("/api/embeddings", post=text(EmbeddingsResponse, engine_request.embeddings))
        routes.add("/api/pull", post=self._files.pull)
        routes.add("/api/delete", delete=self._files.delete)
        for path in _NOT_SERVED:
            refuse = functools.partial(self.refuse, path)
            routes.add(path, get=refuse, post=refuse)

    async def root(self, _: web.BaseRequest) -> web.Response:
        return web.Response(text=RUNNING)

    async def version(self, _: web.BaseRequest) -> web.Response:
        return json_response({"version": API_VERSION})

    async def refuse(self, path: str, request: web.BaseRequest) -> web.Response:
        raise NotServed(f"{request.path} is not served here: {_NOT_SERVED[path]}")

    def _handler(
        self, response: type[OllamaResponse], translate: Translate
    ) -> Callable[[web.BaseRequest], Any]:
        return functools.partial(self._text, response, translate)

    async def _text(
        self, response: type[OllamaResponse], translate: Translate, request: web.BaseRequest
    ) -> web.StreamResponse:
        answer = response(request, request[ACCESS_RECORD])

        async def serve(
            request: web.BaseRequest, _: ClientResponse, share: Share, names: ModelNames
        ) -> None:
            await self._serve(translate, request, answer, share, names)

        return await self._forwarded.answered(request, answer, serve)

    async def _serve(
        self,
        translate: Translate,
        request: web.BaseRequest,
        answer: OllamaResponse,
        share: Share,
        names: ModelNames,
    ) -> None:
        body = await read_body(request, share)
        await check_complexity(body, share)
        asked = await share.run(len(body), lambda: _asked(members_of(body), translate, names))
        answer.take(asked.given_model, engine := asked.request)
        if engine is None:
            await self._load(asked, answer, share.settings.queue_timeout_s)
            return
        share.add_bytes(len(body))
        content = await share.run(
            len(body),
            lambda: json_content(
                written({**engine.members, "model": asked.model}),
                engine.kind,
                None,
                names,
                share.settings,
                cache_owner(request, share.settings),
            ),
        )
        request_id = answer.record.request_id
        path, kind = engine.path, engine.kind
        read = request_of(request, request_id, share.settings, path, kind, content)
        await self._forwarded.serve(request, answer, share, names, read=read)

    async def _load(self, asked: _Asked, answer: OllamaResponse, limit_s: float) -> None:
        """Load a model, or let it be unloaded at once; a node loads none."""
        model = asked.model
        is_unloaded = asked.keep_alive_s == 0
        if asked.is_local and not is_unloaded:
            try:
                async with asyncio.timeout(limit_s):
                    await self._loader.ensure_ready(model)
            except TimeoutError as error:
                message = f"timed out after {limit_s:g} s waiting for {model} to load; retry later"
                raise QueueTimeout(message) from error
        if asked.is_local and asked.keep_alive_s is not None:
            self._host.keep_alive(model, asked.keep_alive_s)
        reason = {"done": True, "done_reason": "unload" if is_unloaded else "load"}
        body = orjson.dumps({**header(answer.model), **answer.empty(), **reason})
        length = str(len(body))
        headers = {"Content-Type": "application/json", "Content-Length": length}
        await answer.begin(200, CIMultiDict(headers))
        await answer.finish(body)


def _asked(members: dict[str, Any], translate: Translate, names: ModelNames) -> _Asked:
    given = given_name(members)
    name = untagged(given, names)
    model_info = names.resolve(name).model_info
    request = translate(members)
    model = name or model_info.id
    stays_s = keep_alive_s(members) if request is None else None
    is_local = model_info.is_local
    return _Asked(
        model if request else model_info.id, is_local, given or model_info.id, request, stays_s
    )
