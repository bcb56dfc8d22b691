"""Every page there is, and who answers it.

    GET   /health  /v1/health                 whether any model can be served
    GET   /v1/models  /models  (and /{id})    the models
    the table PASSED                          an instance of the model that the request names

Pages of llama-server that change it (POST /slots, /props, /lora-adapters) are not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import orjson
from aiohttp import web

from proxy import aggregate
from proxy.answer import Answer, error_response
from proxy.dispatch import Dispatch, Loader
from proxy.door import RECORD, door, sign
from proxy.errors import ProxyError
from proxy.flight import Floor, flying
from proxy.forward import Forward
from proxy.record import CLIENT_GONE, Tell
from proxy.request import find_model, read_ask
from proxy.settings import ProxySettings

FLOOR: Final = web.AppKey("floor", Floor)

PASSED: Final[Mapping[str, tuple[str, ...]]] = {
    "GET": ("/metrics", "/props", "/slots"),
    "POST": (
        "/apply-template",
        "/chat/completions",
        "/completion",
        "/completions",
        "/detokenize",
        "/embedding",
        "/embeddings",
        "/infill",
        "/rerank",
        "/reranking",
        "/responses",
        "/tokenize",
        "/v1/audio/transcriptions",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/reranking",
        "/v1/responses",
    ),
}


def build_app(
    dispatch: Dispatch, loader: Loader, settings: ProxySettings, tell: Tell
) -> web.Application:
    """Build the application; `proxy.server.Server` runs it, in tests as in production.

    Args:
        dispatch: The instances; whoever runs them admits and withdraws them there.
        loader: The models, and how one is made ready.
        settings: The limits.
        tell: Hears how each request ended; see `proxy.record`.
    """
    floor = Floor()
    pages = _Pages(dispatch, loader, settings, Forward(dispatch, settings, tell), floor)
    app = web.Application(middlewares=[door(settings, floor, tell)])
    app[FLOOR] = floor
    app.on_response_prepare.append(sign)
    for path in ("/health", "/v1/health"):
        app.router.add_get(path, pages.health)
    for path in ("/models", "/v1/models"):
        app.router.add_get(path, pages.models)
        app.router.add_get(path + "/{id:.+}", pages.model)
    for path in PASSED["GET"]:
        app.router.add_get(path, pages.passed)
    for path in PASSED["POST"]:
        app.router.add_post(path, pages.passed)
    return app


class _Pages:
    def __init__(
        self,
        dispatch: Dispatch,
        loader: Loader,
        settings: ProxySettings,
        forward: Forward,
        floor: Floor,
    ) -> None:
        self._dispatch = dispatch
        self._loader = loader
        self._settings = settings
        self._forward = forward
        self._floor = floor

    async def health(self, request: web.Request) -> web.Response:
        sick = aggregate.sickness(self._loader.models())
        return error_response(request.path, sick) if sick else _json({"status": "ok"})

    async def models(self, _: web.Request) -> web.Response:
        return _json(aggregate.model_list(self._loader.models()))

    async def model(self, request: web.Request) -> web.Response:
        card = find_model(request.match_info["id"], self._loader.models())
        return _json(aggregate.model_page(card))

    async def passed(self, request: web.Request) -> web.StreamResponse:
        answer = Answer(request, request[RECORD])
        try:
            async with flying() as flight:
                with self._floor.flights.holding(flight):
                    await self._serve(request, answer)
        except ConnectionError:  # the client's: an instance's is an UpstreamFailed by now
            answer.record.status = CLIENT_GONE
        except ProxyError as error:
            if not answer.has_begun:
                raise
            answer.record.status = error.status
            await answer.break_off(error)
        return answer.response

    async def _serve(self, request: web.Request, answer: Answer) -> None:
        record, limit_bytes = answer.record, self._settings.max_body_bytes
        ask = await read_ask(request, record.request_id, limit_bytes, self._loader.models())
        record.model = ask.model
        if not self._dispatch.serves(ask.model):
            await self._loader.ensure_ready(ask.model)
        await self._forward.carry(ask, answer)


def _json(content: object) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")
