"""Ollama's API: `/api/…`, and `/`, which its clients use to check that a server runs.

GET    /  /api/version  /api/tags  /api/ps
POST   /api/show  /api/chat  /api/generate  /api/embed  /api/embeddings  /api/pull
DELETE /api/delete
       /api/create  /api/copy  /api/push  /api/blobs/{digest}    are refused

Requests for text and vectors use the same keys, queues, leases, caches and fallbacks as all others.
`/api/tags`, `/api/ps` and `/api/show` list the models that a client may use; `chat` and
`chat:latest` are the same model. `/api/pull` and `/api/delete` work only if the settings allow it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.apis.batch_completions import write_whole
from proxy.apis.forwarded import ForwardedEndpoints
from proxy.apis.ollama_translation import TRANSLATED, EngineRequest, OllamaAnswer, Translate, header
from proxy.auth.api_keys import KEY
from proxy.batches.own_requests import OwnAnswer
from proxy.common.headers import RESPONSE_HEADERS
from proxy.endpoints.feature import Core, Feature
from proxy.endpoints.local import parameter_size
from proxy.errors import BadRequest, Forbidden, NotServed, ProxyError
from proxy.forward.response import ClientResponse
from proxy.http.api_formats import LINES, OLLAMA
from proxy.http.body import Share, check_complexity, members_of, read_body, read_members
from proxy.http.middleware import Routes, json_response
from proxy.request.models import (
    ModelDetails,
    ModelInfo,
    ModelNames,
    OllamaHost,
    Progress,
    Residence,
    client_models,
    load_in_time,
    with_variants,
)
from proxy.request.request import (
    ProxyRequest,
    cache_owner,
    client_of,
    complete,
    encode_members,
    json_request,
    keep_alive_s,
    named_model,
    prompt_change,
)

_LATEST: Final = ":latest"
_HUB: Final = "hf.co/"


def without_tag(name: str | None, names: ModelNames) -> str | None:
    """Return the configured name of a model for a client's name.

    A client may write the hub's host before the name of a model that it pulled from there.
    """
    if not name or names.get(name):
        return name
    short = name.removesuffix(_LATEST).removeprefix(_HUB)
    return short if names.get(short) or not name.startswith(_HUB) else name


def given_name(members: dict[str, Any]) -> str | None:
    """Return the model that a body names, also by the older member `name`; raises BadRequest."""
    name = named_model(members)
    return named_model({"model": members.get("name")}) if name is None else name


def required_name(members: dict[str, Any]) -> str:
    """Return `given_name`; raises BadRequest if there is none."""
    if not (name := given_name(members)):
        raise BadRequest('the request names no model; send {"model": NAME}')
    return name


# Ollama shows this as "Forever"; its clients need a date.
_FOR_EVER: Final = timedelta(days=365 * 100)


def tag(model_info: ModelInfo, details: ModelDetails) -> dict[str, Any]:
    name = model_info.id if ":" in model_info.id else model_info.id + _LATEST
    # A hash of the entry: no file is hashed for a list.
    entry = (model_info.id, sorted(model_info.meta.items()))
    return {
        "name": name,
        "model": name,
        "modified_at": _date(model_info.created),
        "size": model_info.meta.get("size", 0),
        "digest": hashlib.sha256(repr(entry).encode()).hexdigest(),
        "details": _details(model_info, details),
    }


def show(model_info: ModelInfo, details: ModelDetails) -> dict[str, Any]:
    return {
        "license": "",
        "modelfile": f"# This model is configured in corral.toml.\nFROM {model_info.id}\n",
        "parameters": f"num_ctx {model_info.context_length}" if model_info.context_length else "",
        "template": details.chat_template,
        "details": _details(model_info, details),
        "model_info": _facts(model_info, details.architecture or "unknown"),
        "capabilities": list(details.capabilities),
        "modified_at": _date(model_info.created),
    }


def running_entry(
    model_info: ModelInfo, details: ModelDetails, residence: Residence, now: datetime
) -> dict[str, Any]:
    left_s = residence.unload_in_s
    expires = now + (_FOR_EVER if left_s is None else timedelta(seconds=left_s))
    listed = tag(model_info, details)
    del listed["modified_at"]
    return {
        **listed,
        "size": residence.memory_bytes or listed["size"],
        "expires_at": expires.isoformat(),
        "size_vram": residence.gpu_bytes,
        "context_length": model_info.context_length or 0,
    }


def _details(model_info: ModelInfo, details: ModelDetails) -> dict[str, Any]:
    family = details.architecture
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": parameter_size(model_info.meta.get("n_params")),
        "quantization_level": str(model_info.meta.get("ftype", "")).split(" ")[0],
    }


def _facts(model_info: ModelInfo, architecture: str) -> Mapping[str, object]:
    """Return facts of the model's file by GGUF's names; the context is the limit of a request."""
    meta = model_info.meta
    found = {
        "general.architecture": architecture,
        "general.parameter_count": meta.get("n_params"),
        f"{architecture}.context_length": model_info.context_length or meta.get("n_ctx_train"),
        f"{architecture}.embedding_length": meta.get("n_embd"),
        f"{architecture}.vocab_size": meta.get("n_vocab"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _date(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat()


_SUCCESS: Final = {"status": "success"}


async def _stream(
    request: web.BaseRequest, progress: AsyncGenerator[Progress, None]
) -> web.StreamResponse:
    own = request[RESPONSE_HEADERS]
    response = web.StreamResponse(headers={"Content-Type": LINES, **own})
    last: Mapping[str, object] = _SUCCESS
    async with aclosing(progress):
        try:
            async for step in progress:
                await response.prepare(request)  # only the first call does something
                await response.write(_line(_members(step)))
        except ProxyError as error:
            if not response.prepared:
                raise
            last = {"error": error.message}
    await response.prepare(request)
    await response.write_eof(_line(last))
    return response


def _members(step: Progress) -> Mapping[str, object]:
    if not step.total_bytes:
        return {"status": step.status}
    digest = hashlib.sha256(step.file.encode()).hexdigest()
    return {
        "status": f"{step.status} {step.file}",
        "digest": f"sha256:{digest}",
        "total": step.total_bytes,
        "completed": step.completed_bytes,
    }


def _line(members: Mapping[str, object]) -> bytes:
    return orjson.dumps(members, option=orjson.OPT_APPEND_NEWLINE)


async def _pull_present_model() -> AsyncGenerator[Progress, None]:
    yield Progress("pulling manifest")


_NO_DETAILS: Final = ModelDetails()


# The API is that of this release, the first with `/v1/messages` beside `/v1/responses`. Clients
# compare it with the release that they need.
API_VERSION: Final = "0.14.0"
RUNNING: Final = "Ollama is running"
_NOT_SERVED: Final[Mapping[str, str]] = {
    "/api/create": "a model is described in corral.toml; see `corral import` for a Modelfile",
    "/api/copy": "give a model another name by `aliases` in corral.toml",
    "/api/push": "models are not uploaded",
    "/api/blobs/{id}": "models come from files on this machine or by /api/pull",
}


class OllamaEndpoints(Feature):
    """Answers the endpoints; a key that may use only some models may not change them."""

    def __init__(self, core: Core, forwarded: ForwardedEndpoints, host: OllamaHost) -> None:
        self._forwarded = forwarded
        self._loader = core.loader
        self._host = host
        self._bodies = core.bodies
        settings = core.settings.ollama
        self.address, self.is_at_main_address = settings.listen, settings.enabled

    def add_routes(self, routes: Routes) -> None:
        routes.add("/", get=self.root)
        routes.add("/api/version", get=self.version)
        routes.add("/api/tags", get=self.tags)
        routes.add("/api/ps", get=self.running)
        routes.add("/api/show", post=self.show)
        for path, (new_answer, translate) in TRANSLATED.items():
            routes.add(path, post=functools.partial(self._answer, new_answer, translate))
        routes.add("/api/pull", post=self.pull)
        routes.add("/api/delete", delete=self.delete)
        for path in _NOT_SERVED:
            refuse = functools.partial(self.refuse, path)
            routes.add(path, get=refuse, post=refuse)

    async def root(self, _: web.BaseRequest) -> web.Response:
        return web.Response(text=RUNNING)

    async def version(self, _: web.BaseRequest) -> web.Response:
        return json_response({"version": API_VERSION})

    async def refuse(self, path: str, request: web.BaseRequest) -> web.Response:
        raise NotServed(f"{request.path} is not served here: {_NOT_SERVED[path]}")

    async def tags(self, request: web.BaseRequest) -> web.Response:
        models = with_variants(client_models(self._loader, request))
        details = await self._details(models)
        return json_response({"models": [tag(model, details[model.id]) for model in models]})

    async def running(self, request: web.BaseRequest) -> web.Response:
        found = client_models(self._loader, request)
        models = [model for model in found if model.state == "loaded"]
        details, now = await self._details(models), datetime.now(tz=UTC)
        listed = [
            running_entry(model, details[model.id], self._host.residence(model.id), now)
            for model in models
        ]
        return json_response({"models": listed})

    async def show(self, request: web.BaseRequest) -> web.Response:
        name = required_name(await self._read(request))
        names = ModelNames(with_variants(client_models(self._loader, request)))
        found = names.resolve(without_tag(name, names)).model_info
        return json_response(show(found, (await self._details([found]))[found.id]))

    async def pull(self, request: web.BaseRequest) -> web.StreamResponse:
        """Download a model, and report the progress in lines; a served model is complete at once.

        Raises ProxyError, as `OllamaHost.pull`, before the first line.
        """
        members = await self._read(request)
        name, names = required_name(members), self._names(request)
        if names.get(without_tag(name, names) or ""):
            progress = _pull_present_model()
        else:
            self._check_may_change(request)
            progress = self._host.pull(name)
        if members.get("stream") is not False:
            return await _stream(request, progress)
        async with aclosing(progress):
            async for _ in progress:
                pass
        return json_response(_SUCCESS)

    async def delete(self, request: web.BaseRequest) -> web.Response:
        """Delete a model; raises as `OllamaHost.delete`, and UnknownModel."""
        name = required_name(await self._read(request))
        self._check_may_change(request)
        names = self._names(request)
        short = without_tag(name, names) or ""
        found = names.resolve(short)
        # The id of a model of the hub has no slash.
        if found.model_info.id not in {short, short.replace("/", "--")}:
            raise BadRequest(f"{name} is another name of {found.model_info.id}; delete that")
        await self._host.delete(found.model_info.id)
        return web.Response()

    def _check_may_change(self, request: web.BaseRequest) -> None:
        if not self._bodies.settings.ollama.manage_models:
            raise Forbidden(
                "clients may not download or delete models here; "
                "to allow it, set manage_models = true under [proxy.ollama]"
            )
        if (key := request[KEY]) and key.models is not None:
            raise Forbidden("this API key may use only some models, so it may not change them")

    def _names(self, request: web.BaseRequest) -> ModelNames:
        return ModelNames(client_models(self._loader, request))

    async def _read(self, request: web.BaseRequest) -> dict[str, Any]:
        with self._bodies.share(client_of(request)) as share:
            return await read_members(request, share)

    async def _details(self, models: Sequence[ModelInfo]) -> Mapping[str, ModelDetails]:
        """Return the details of each entry of a list, by its id; a variant has its model's."""
        base_ids = {model.id: model.variant_of or model.id for model in models}
        local = {base_ids[model.id] for model in models if model.is_local}
        details = await self._host.details(sorted(local))
        return {name: details.get(base, _NO_DETAILS) for name, base in base_ids.items()}

    async def _answer(
        self, new_answer: Callable[[], OllamaAnswer], translate: Translate, request: web.BaseRequest
    ) -> web.StreamResponse:
        answer = new_answer()
        serve = functools.partial(self._serve, translate, answer)
        return await self._forwarded.answer(serve, request, api=replace(OLLAMA, ping=answer.ping))

    async def _serve(
        self,
        translate: Translate,
        answer: OllamaAnswer,
        request: web.BaseRequest,
        response: ClientResponse,
        share: Share,
        names: ModelNames,
    ) -> None:
        body = await read_body(request, share)
        await check_complexity(body, share)

        def parse() -> tuple[dict[str, Any], str, ModelInfo, EngineRequest | None]:
            members = members_of(body)
            name = without_tag(given_name(members), names)
            model_info = names.resolve(name).model_info
            return members, name or model_info.id, model_info, translate(members)

        members, model, model_info, engine = await share.run(len(body), parse)
        answer.take(given_name(members) or model_info.id, engine)
        if engine is None:
            stays_s = keep_alive_s(members)
            await self._load(model_info, stays_s, share.settings.queue_timeout_s)
            end = {"done": True, "done_reason": "unload" if stays_s == 0 else "load"}
            loaded = {**header(answer.model), **answer.empty, **end}
            await write_whole(response, OwnAnswer(HTTPStatus.OK, orjson.dumps(loaded)))
            return
        share.add_bytes(len(body))
        owner, change = cache_owner(request, share.settings), prompt_change(request, names)

        def encode() -> ProxyRequest:
            encoded = encode_members({**engine.members, "model": model})
            return json_request(encoded, engine.kind, None, names, share.settings, owner, change)

        read = await share.run(len(body), encode)
        complete(read, request, response.record.request_id, engine.path)
        response.add(answer)
        await self._forwarded.serve(request, response, share, names, read=read)

    async def _load(self, model_info: ModelInfo, stays_s: float | None, limit_s: float) -> None:
        """Load a model of this machine for `stays_s`, or have it unloaded at once if that is 0."""
        if not model_info.is_local:
            return
        if stays_s != 0:
            await load_in_time(self._loader, model_info.id, limit_s)
        if stays_s is not None:
            self._host.keep_alive(model_info.id, stays_s)
