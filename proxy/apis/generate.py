"""Plain generation: `/generate`, `/stream/generate`, `/batch/tokenize`, `/v1/gpu/*`, the runtime.

An instance answers them at its own endpoint, `/completion` or `/tokenize`. `strategy` selects one
way of sampling: `greedy`, `top_k` or `top_p`. A request without it is sampled with its
`temperature`, `top_k` or `top_p`, and greedily if it has none of them. Members that are not listed
here are llama-server's own and pass. `/batch/tokenize` sends one request for each text.

A GPU here is a device that holds layers of a model. A warm-up of a model without such a device
loads it too, but reports no success, and says where the model runs.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.apis import batch_completions as batches
from proxy.apis.llama_server import Rewritten
from proxy.auth.api_keys import KEY
from proxy.batches.own_requests import OwnAnswer, OwnRequests
from proxy.common.headers import HOP
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest, quote
from proxy.forward.response import ClientResponse, EventTransform, StreamTransform
from proxy.http.api_formats import named_event
from proxy.http.body import Share, read_members
from proxy.http.middleware import Routes, json_response
from proxy.observe.record import InFlightRequest
from proxy.request.models import EngineReader, ModelNames, load_in_time
from proxy.request.request import Translation, client_of, named_model
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import members_of as event_members


def token_list(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"token_ids": answer["tokens"], "num_tokens": len(answer["tokens"])}


class TokenEvents(EventTransform):
    """Translates a stream of `/completion` into events `token`, and one event `done` or `error`."""

    def event(self, event: bytes) -> bytes:
        piece = event_members(event)
        if piece is None:
            return b""
        if "error" in piece:
            return named_event("error", piece)
        *silent, last = piece.get("tokens") or [None]
        tokens = [{"token_id": token, "text": ""} for token in silent]
        if last is not None:  # the last of them completed the text
            tokens.append({"token_id": last, "text": piece.get("content", "")})
        events = [named_event("token", token) for token in tokens]
        count = piece.get("tokens_predicted")
        if piece.get("stop") is True and isinstance(count, int):
            events.append(named_event("done", {"num_generated": count}))
        return b"".join(events)


_OURS: Final = frozenset(
    ("prompt", "prompts", "max_tokens", "temperature", "strategy", "top_k", "top_p", "model_id")
)
# These change the format of a completion's response.
_REFUSED: Final = ("n", "n_cmpl", "response_fields")


def completion_of(members: Mapping[str, Any], *, is_stream: bool) -> dict[str, Any]:
    """Return the request for one prompt; raises BadRequest."""
    prompt = members.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequest("a prompt must be a string")
    if not prompt:
        raise BadRequest(batches.EMPTY_PROMPT)
    return {**_completion(members, is_stream=is_stream), "prompt": prompt}


def read_batch(members: Mapping[str, Any], max_prompts: int) -> batches.PromptBatch:
    """Return the requests for several prompts; raises BadRequest, LimitExceeded."""
    prompts = batches.prompts_of(members, max_prompts)
    return prompts, _completion(members, is_stream=False)


def with_model(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the member `model` of a request; a client may also call it `model_id`."""
    name = members.get("model") or members.get("model_id")
    return {} if name is None else {"model": name}


def _completion(members: Mapping[str, Any], *, is_stream: bool) -> dict[str, Any]:
    if refused := next((name for name in _REFUSED if members.get(name) not in (None, 1)), None):
        raise BadRequest(f"the member {refused} has no meaning here; send it to /completion")
    given = {name: value for name, value in members.items() if value is not None}
    passed = {name: value for name, value in given.items() if name not in _OURS}
    return {
        **_sampling(given),
        **passed,
        **with_model(given),
        # An engine generates one token even if the limit is 0.
        "n_predict": batches.whole_number(given, "max_tokens", 50),
        "stream": is_stream,
        "return_tokens": True,
    }


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that make the engine sample only with the requested strategy."""
    temperature = given.get("temperature", 1.0)
    implied = "top_k" if given.keys() & {"temperature", "top_k"} else "greedy"
    match given.get("strategy", "top_p" if "top_p" in given else implied):
        case "greedy":
            return {"temperature": 0}
        case "top_k":
            k = batches.whole_number(given, "top_k", 50)
            return {"temperature": temperature, "top_k": k, "top_p": 1, "min_p": 0}
        case "top_p":
            p = given.get("top_p", 0.9)
            return {"temperature": temperature, "top_k": 0, "top_p": p, "min_p": 0}
        case other:
            raise BadRequest(f"Invalid strategy: {quote(str(other))}; it is greedy, top_k or top_p")


TOKENIZE: Final = "/tokenize"


Translate = Callable[[], tuple[Translation, StreamTransform]]


def _translate(*, is_stream: bool) -> tuple[Translation, StreamTransform]:
    def rewrite(body: bytes) -> bytes:
        return orjson.dumps(batches.generated_completion(orjson.loads(body)))

    members = functools.partial(completion_of, is_stream=is_stream)
    translation = Translation("/completion", EndpointKind.LLAMA_COMPLETION, members)
    return translation, TokenEvents() if is_stream else Rewritten(rewrite)


def translate_tokenize() -> tuple[Translation, StreamTransform]:
    """Return llama-server's own answer for `content`, and our format for `text`."""
    has_text = False

    def members_for_engine(members: dict[str, Any]) -> dict[str, Any]:
        nonlocal has_text
        has_text = "text" in members and "content" not in members
        return tokenize_members(members, members["text"]) if has_text else members

    def rewrite(body: bytes) -> bytes:
        return orjson.dumps(token_list(orjson.loads(body))) if has_text else body

    return Translation(TOKENIZE, EndpointKind.INFO, members_for_engine), Rewritten(rewrite)


def tokenize_members(members: Mapping[str, Any], text: object) -> dict[str, Any]:
    """Return llama-server's request for the tokens of a text; raises BadRequest."""
    if not isinstance(text, str):
        raise BadRequest("a text must be a string")
    return {**with_model(members), "content": text}


TRANSLATED: Final[Mapping[str, Translate]] = {
    "/generate": functools.partial(_translate, is_stream=False),
    "/stream/generate": functools.partial(_translate, is_stream=True),
    TOKENIZE: translate_tokenize,
}


_AT_ONCE: Final = 4


async def tokenize_batch(
    own: OwnRequests,
    request: web.BaseRequest,
    response: ClientResponse,
    share: Share,
    names: ModelNames,
) -> None:
    """Answer `/batch/tokenize`; if one text fails, its error is the response."""
    members = await read_members(request, share)
    model = names.resolve(named_model(with_model(members)) or request.query.get("model"))
    texts = batches.strings_of(members, "texts", 1024)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def tokenize(index: int, text: str) -> dict[str, Any]:
        async with gate:
            answer = await own.answer(
                TOKENIZE,
                {"model": model.model_info.id, "content": text},
                client=client_of(request),
                request_id=f"{response.record.request_id}-{index}",
                requests=0,
                limit_wait_s=share.settings.queue_timeout_s,
                names=names,
                is_from_proxy=HOP in request.headers,
            )
        if answer.status != HTTPStatus.OK:
            raise batches.BatchRefused(answer)
        return token_list(orjson.loads(answer.body))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(tokenize(*numbered)) for numbered in enumerate(texts)]
        answer = OwnAnswer(200, orjson.dumps({"results": [task.result() for task in tasks]}))
    except BaseExceptionGroup as failed:
        if not isinstance(first := failed.exceptions[0], batches.BatchRefused):
            raise first from None  # without the task group around it
        answer = first.answer
    await batches.write_whole(response, answer)


class EngineEndpoints(Feature):
    def __init__(self, core: Core, engine: EngineReader) -> None:
        self._core = core
        self._engine = engine

    def add_routes(self, routes: Routes) -> None:
        routes.add("/v1/gpu/warmup", post=self.warmup)
        routes.add("/v1/gpu/status", get=self.status)
        routes.add("/corral/v1/runtime", get=self.runtime)

    async def warmup(self, request: web.BaseRequest) -> web.Response:
        """Load a model of this machine, and report its layers on GPUs.

        Raises:
            BadRequest: There are several models, and the request names none.
            QueueTimeout: The model was not loaded in time.
            ProxyError: As `ModelLoader.ensure_ready` and `read_body` do.
        """
        in_flight = InFlightRequest(self._core.server_state.in_flight)
        with in_flight, self._core.bodies.share(client_of(request)) as share:
            members = await read_members(request, share, may_be_empty=True)
            name = named_model(with_model(members)) or request.query.get("model")
            model = self._names(request).resolve(name).model_info.id
            await load_in_time(self._core.loader, model, share.settings.queue_timeout_s)
        use = self._engine.gpu_use(model)
        message = f"{model} is loaded and runs on the CPU: no layer of it is on a GPU"
        if use.layers:
            size, devices = f"{use.memory_bytes / 1e9:.2f} GB", ", ".join(use.devices)
            message = f"{model} is loaded: {use.layers} layers on {devices}, {size}"
        answer = {
            "success": use.layers > 0,
            "memory_bytes": use.memory_bytes,
            "num_layers": use.layers,
            "message": message,
        }
        return json_response(answer)

    async def status(self, request: web.BaseRequest) -> web.Response:
        infos = self._names(request).model_infos
        uses = [use for info in infos if (use := self._engine.gpu_use(info.id)).layers]
        batch = self._core.settings.batch.config
        answer = {
            "cache_ready": bool(uses),
            "cache_memory_bytes": sum(use.memory_bytes for use in uses),
            "batch_threshold": batch.gpu_threshold,
            "recommended_min_batch": batch.min_batch,
        }
        return json_response(answer)

    async def runtime(self, _: web.BaseRequest) -> web.Response:
        return json_response(await self._engine.runtime())

    def _names(self, request: web.BaseRequest) -> ModelNames:
        key = request[KEY]
        return self._core.loader.names().local.visible(key.models if key else None)
