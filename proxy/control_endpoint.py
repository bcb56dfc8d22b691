"""`/v1/chat/completions/control`: acts on a completion that an instance is generating.

Only its client knows the id of a completion, and the proxy does not read the ids in a stream. So
every instance of the model gets the request, and the one that generates the completion acts.

Source: llama-server, build 10434: the answer has `success`, false where no completion has the id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.endpoints import EndpointKind
from proxy.errors import NotLoaded, ProxyError
from proxy.forward.node_request import for_node
from proxy.forward.upstream_errors import client_error_body, reclassified
from proxy.headers import JSON
from proxy.models import ModelLoader
from proxy.request import client_names, client_of, named_model
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.router.router import Router
from proxy.routes import Routes
from proxy.upstream.client import FetchedBody, UpstreamRequest, fetch
from proxy.upstream.upstream import Upstream

PATH: Final = "/v1/chat/completions/control"
# An engine acts between two batches; a batch may take seconds.
_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 64 * 1024


class ControlEndpoint:
    """It loads no model, and takes no slot."""

    def __init__(
        self, loader: ModelLoader, router: Router, server_state: ServerState, bodies: Bodies
    ) -> None:
        self._loader = loader
        self._router = router
        self._server_state = server_state
        self._bodies = bodies

    def add_routes(self, routes: Routes) -> None:
        routes.add(PATH, post=self.answer)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer as the instance that acted, or else as any of them.

        Raises:
            NotLoaded: No instance of the model runs.
            ProxyError: As `read_body` and `ModelNames.resolve` do, or no instance answered.
        """
        in_flight = InFlightRequest(self._server_state.in_flight)
        with in_flight, self._bodies.share(client_of(request)) as share:
            body, members = await _read(request, share)
            name = named_model(members) or request.query.get("model")
            model = client_names(self._loader, request).resolve(name).model_info.id
            answers = await self._send(self._upstreams(model), body)
        answer = first_successful(answers)
        status, body = reclassified(answer.status, answer.body)
        if status >= HTTPStatus.BAD_REQUEST:
            body = client_error_body(EndpointKind.CHAT, PATH, status, body)
        return web.Response(body=body, status=status, headers={"Content-Type": JSON})

    def _upstreams(self, model: str) -> list[Upstream]:
        """Return the instances of a model, also those that only finish what they have."""
        found = [one.upstream for one in self._router.instances() if one.upstream.model == model]
        if not found:
            raise NotLoaded(f"{model} is not loaded, so it generates no completion")
        return found

    async def _send(self, upstreams: Sequence[Upstream], body: bytes) -> list[FetchedBody]:
        """Send to all at once; raises the error of one where none answers."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._fetch(upstream, body)) for upstream in upstreams]
        results = [task.result() for task in tasks]
        answers = [one for one in results if isinstance(one, FetchedBody)]
        if not answers:
            raise next(one for one in results if isinstance(one, ProxyError))
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
    """Return the first answer that reports success, or else the first one."""
    found = list(answers)
    return next((one for one in found if _is_success(one)), found[0])


def _is_success(answer: FetchedBody) -> bool:
    try:
        members = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return False
    return answer.status == 200 and isinstance(members, dict) and members.get("success") is True


async def _read(request: web.BaseRequest, share: Share) -> tuple[bytes, dict[str, Any]]:
    body = await read_body(request, share)
    await check_complexity(body, share)
    return body, members_of(body)
