"""Every page there is, and who answers it.

GET   /health  /v1/health                 whether any model can be served
GET   /v1/models  /models  (and /{id})    the models
GET   /slots                              the slots of all instances, as llama-server lists its own
GET   /corral/v1/slots                    the same with instances, totals and lines
GET   /metrics                            figures for Prometheus
POST  /corral/v1/models/{id}/warm         have a prompt read ahead
the table of `pages`                      an instance of the model that the request names
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from http import HTTPStatus
from typing import Final

import orjson
from aiohttp import web

from proxy.body.bodies import Bodies, Share
from proxy.carry import props
from proxy.carry.answer import Answer, error_response
from proxy.carry.forward import Forward
from proxy.carry.props import PropsAnswer, Remembered
from proxy.connections import Connections, descriptors_max, limit_of
from proxy.errors import NotLoaded, ProxyError, Unavailable
from proxy.gate.door import RECORD, Door
from proxy.gate.keys import KEY, visible
from proxy.headers import HOP
from proxy.home.openings import Openings
from proxy.line.dispatch import Dispatch
from proxy.line.flight import Flight, Floor
from proxy.loader import Loader, ModelCard, Reader
from proxy.nodes.cards import local
from proxy.pages import PASSED
from proxy.record import CLIENT_GONE, Tell
from proxy.request import Ask, client_of, read_ask
from proxy.roster import find, listed
from proxy.settings import ProxySettings
from proxy.warm import WarmPage
from proxy.watch import aggregate
from proxy.watch.metrics import Metrics
from proxy.watch.overview import engine_list, has_idle, overview

FLOOR: Final = web.AppKey("floor", Floor)
CONNECTIONS: Final = web.AppKey("connections", Connections[Hashable])


def build_app(
    dispatch: Dispatch,
    loader: Loader,
    settings: ProxySettings,
    tell: Tell,
    reader: Reader | None = None,
) -> web.Application:
    """Build the application; `proxy.server.Server` runs it, in tests as in production.

    Args:
        dispatch: The instances; whoever runs them admits and withdraws them there.
        loader: The models, and how one is made ready.
        settings: The limits.
        tell: Hears how each request ended; see `proxy.record`.
        reader: Has prompts read ahead; without one, there is no page for that.

    Raises:
        Misconfigured: An origin, a host or the file of API keys is wrong.
    """
    metrics = Metrics(dispatch, settings, tell)
    dispatch.loader, dispatch.tell = loader, metrics.tell
    floor = Floor()
    forward = Forward(dispatch, settings, metrics.tell)
    pages = _Pages(dispatch, loader, metrics, has_keys=settings.keys_file is not None)
    bodies = Bodies(settings)
    passed = _Passed(loader, forward, floor, metrics, reader, bodies)
    limit = limit_of(settings.max_connections, descriptors_max())
    connections = Connections[Hashable](limit)
    door = Door(settings, floor, metrics.tell, connections)
    app = web.Application(middlewares=[door.pass_through])
    app[FLOOR], app[CONNECTIONS] = floor, connections
    app.on_response_prepare.append(door.sign)
    app.on_cleanup.append(bodies.close)
    for path in ("/health", "/v1/health"):
        app.router.add_get(path, pages.health)
    for path in ("/models", "/v1/models"):
        app.router.add_get(path, pages.models)
        app.router.add_get(path + "/{id:.+}", pages.model)
    app.router.add_get("/slots", pages.slots)
    app.router.add_get("/corral/v1/slots", pages.overview)
    app.router.add_get("/metrics", pages.metrics)
    if reader:
        warm = WarmPage(loader, reader, floor, bodies)
        app.router.add_post("/corral/v1/models/{id:.+}/warm", warm.answer)
    app.router.add_get(props.PATH, passed.props)
    for path in PASSED["POST"]:
        app.router.add_post(path, passed.answer)
    return app


class _Pages:
    def __init__(
        self, dispatch: Dispatch, loader: Loader, metrics: Metrics, *, has_keys: bool
    ) -> None:
        self._has_keys = has_keys
        self._dispatch = dispatch
        self._loader = loader
        self._metrics = metrics

    async def health(self, request: web.Request) -> web.Response:
        cards = self._loader.models()
        if sick := aggregate.sickness(cards):
            return error_response(request.path, sick)
        if self._has_keys and KEY not in request:
            return _json(dict(aggregate.HEALTHY))
        return _json(aggregate.health(cards, self._dispatch.seats()))

    async def models(self, request: web.Request) -> web.Response:
        return _json(aggregate.model_list(listed(self._cards(request))))

    async def model(self, request: web.Request) -> web.Response:
        pick = find(request.match_info["id"], listed(self._cards(request)))
        return _json(aggregate.model_page(pick.card))

    async def slots(self, request: web.Request) -> web.Response:
        listed = engine_list(self._dispatch.seats(), self._named(request), time.monotonic())
        if "fail_on_no_slot" in request.query and not has_idle(listed):
            raise Unavailable("no slot is available; ask again")
        return _json(listed)

    async def overview(self, request: web.Request) -> web.Response:
        seats, lines = self._dispatch.seats(), self._dispatch.lines()
        return _json(overview(seats, lines, self._named(request), time.monotonic()))

    async def metrics(self, request: web.Request) -> web.Response:
        accept = ",".join(request.headers.getall("Accept", ()))
        body, content_type = await self._metrics.page(accept, self._cards(request))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _cards(self, request: web.Request) -> Sequence[ModelCard]:
        return _cards(self._loader, request)

    def _named(self, request: web.Request) -> Sequence[ModelCard]:
        """Return the model that the query names; all there are for who asks, if it names none."""
        cards = self._cards(request)
        name = request.query.get("model")
        return [find(name, cards).card] if name else cards


class _Passed:
    """The pages that an instance answers."""

    def __init__(
        self,
        loader: Loader,
        forward: Forward,
        floor: Floor,
        metrics: Metrics,
        reader: Reader | None,
        bodies: Bodies,
    ) -> None:
        self._loader = loader
        self._forward = forward
        self._floor = floor
        self._metrics = metrics
        self._reader = reader
        self._bodies = bodies
        self._openings = Openings()
        self._remembered = Remembered()

    async def props(self, request: web.Request) -> web.StreamResponse:
        """Answer `/props`, from memory where its model is not loaded."""
        cards = _cards(self._loader, request)
        answer = PropsAnswer(request, request[RECORD])
        try:
            response = await self._answered(request, answer)
        except NotLoaded:
            found = self._remembered.page(find(request.query.get("model"), cards).card)
            if found is None:
                raise
            answer.record.model = None  # a page of our own is not counted
            return found
        if answer.page:
            card = find(request.query.get("model"), cards).card
            self._remembered.keep(card, answer.page, [one.id for one in self._loader.models()])
        return response

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, Answer(request, request[RECORD]))

    async def _answered(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        try:
            async with Flight(self._floor.flights):
                body = self._bodies.share(client_of(request))
                with self._metrics.counting(answer.record), body as share:
                    await self._serve(request, answer, share)
        except ConnectionError:  # the client's: an instance's is an UpstreamFailed by now
            answer.record.status = CLIENT_GONE
        except ProxyError as error:
            if not answer.has_begun:
                raise
            answer.record.status = error.status
            await answer.break_off(error)
        return answer.response

    async def _serve(self, request: web.Request, answer: Answer, share: Share) -> None:
        record = answer.record
        cards = _cards(self._loader, request)
        ask = await read_ask(request, record.request_id, cards, share)
        record.model = ask.model
        await self._forward.carry(ask, answer)
        if record.status == HTTPStatus.OK:
            self._learn(ask)

    def _learn(self, ask: Ask) -> None:
        """Note what a conversation began with, where that is wanted."""
        if self._reader is None or not self._reader.learns(ask.model):
            return
        if opening := self._openings.see(ask.model, ask.kind, ask.members):
            self._reader.learn(ask.model, opening)


def _cards(loader: Loader, request: web.Request) -> Sequence[ModelCard]:
    """Return the models that there are for whoever asks; for another proxy, those here."""
    cards = loader.models()
    return visible(local(cards) if HOP in request.headers else cards, request.get(KEY))


def _json(content: object) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")
