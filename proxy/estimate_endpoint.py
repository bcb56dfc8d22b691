"""`/corral/v1/estimate`: when the first token of a request would come, without sending it.

The body is that of a chat, a text completion, or a request of Anthropic's or the Responses API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from proxy.auth.api_keys import visible_client
from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.endpoints import EndpointKind
from proxy.errors import BadRequest
from proxy.estimator import Estimate, Estimator
from proxy.headers import RESPONSE_HEADERS
from proxy.json_response import json_response
from proxy.middleware import ACCESS_RECORD
from proxy.models import ModelLoader
from proxy.request import (
    Content,
    ProxyRequest,
    cache_owner,
    client_names,
    client_of,
    json_content,
    request_of,
)
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.routes import Routes

_PATH: Final = "/corral/v1/estimate"
_ANTHROPIC: Final = "anthropic-version"


class EstimateEndpoint:
    def __init__(
        self, loader: ModelLoader, estimator: Estimator, server_state: ServerState, bodies: Bodies
    ) -> None:
        self._loader = loader
        self._estimator = estimator
        self._server_state = server_state
        self._bodies = bodies

    def add_routes(self, routes: Routes) -> None:
        routes.add(_PATH, post=self.answer)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer with the estimate; raises as `proxy.request.read_request` does."""
        in_flight = InFlightRequest(self._server_state.in_flight)
        with in_flight, self._bodies.share(client_of(request)) as share:
            proxy_request = await self._read(request, share)
        record = request[ACCESS_RECORD]
        record.client, record.path = proxy_request.client, request.path
        record.model, record.kind = proxy_request.model, proxy_request.kind
        record.status = HTTPStatus.OK
        is_own = visible_client(request) is not None
        found = self._estimator.estimate(proxy_request, is_own=is_own)
        names = client_names(self._loader, request)
        return json_response(estimate_json(found, lambda model: names.get(model) is not None))

    async def _read(self, request: web.BaseRequest, share: Share) -> ProxyRequest:
        body = await read_body(request, share)
        await check_complexity(body, share)
        names, named = client_names(self._loader, request), request.query.get("model")
        owner = cache_owner(request, share.settings)

        def read() -> tuple[EndpointKind, Content]:
            kind = _kind(members_of(body), request.headers)
            return kind, json_content(body, kind, named, names, share.settings, owner)

        kind, content = await share.run(len(body), read)
        request_id = request[RESPONSE_HEADERS]["X-Request-Id"]
        return request_of(request, request_id, share.settings, _PATH, kind, content)


def _kind(members: Mapping[str, Any], headers: Mapping[str, str]) -> EndpointKind:
    """Return whose body it is; raises BadRequest."""
    if "messages" in members:
        is_anthropic = "system" in members or _ANTHROPIC in headers
        return EndpointKind.MESSAGES if is_anthropic else EndpointKind.CHAT
    if "prompt" in members:
        return EndpointKind.COMPLETION
    if "input" in members:
        return EndpointKind.RESPONSES
    raise BadRequest("the body has neither messages nor a prompt; send that of a chat")


def estimate_json(estimate: Estimate, is_visible: Callable[[str], bool]) -> dict[str, object]:
    load, first = estimate.load, estimate.first_token
    return {
        "model": estimate.model,
        "instance": estimate.instance,
        "prompt_tokens": estimate.prompt_tokens,
        "cached_tokens": estimate.prompt_tokens - estimate.new_tokens,
        "queue_s": _rounded(estimate.queue_s),
        "must_load": not estimate.is_loaded,
        "load_s": 0.0 if estimate.is_loaded else _rounded(load.in_s) if load else None,
        "evicts": list(filter(is_visible, load.evicts)) if load else [],
        "refusal": load.refusal if load else None,
        "first_token_s": _rounded(first.first_token_s) if first else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
