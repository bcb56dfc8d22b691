"""Prompts without an answer: `/corral/v1/estimate`, and the endpoint that prefills a prompt.

An estimate gives the time to a request's first token, without sending it. Its body is a chat, a
text completion, or a request of Anthropic's or the Responses API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from prometheus_client import Metric

from proxy.auth.api_keys import KEY, visible_client
from proxy.cache.miss_cause import client_hash
from proxy.cache.prompt import BLOCK_TOKENS, Prompt, read_prompt
from proxy.common.headers import RESPONSE_HEADERS
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest, Forbidden, TooManyRequests
from proxy.http.body import Share, check_complexity, members_of, read_body, read_members
from proxy.http.middleware import ACCESS_RECORD, PATH_ID, Routes, json_response
from proxy.observe.record import InFlightRequest
from proxy.request.limits import check
from proxy.request.models import PromptWarmer, ResolvedModel, client_names
from proxy.request.request import ProxyRequest, cache_owner, client_of, complete, json_request
from proxy.request.variants import with_adapter
from proxy.router.estimator import Estimate, Estimator
from proxy.router.lease import SlotUse, Tokens
from proxy.upstream.endpoint_kinds import EndpointKind

_PATH: Final = "/corral/v1/estimate"
_ANTHROPIC: Final = "anthropic-version"


class EstimateEndpoint(Feature):
    def __init__(self, core: Core, estimator: Estimator) -> None:
        self._core = core
        self._estimator = estimator

    def add_routes(self, routes: Routes) -> None:
        routes.add(_PATH, post=self.answer)

    def metrics(self) -> Iterable[Metric]:
        return self._estimator.collect()

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer with the estimate; raises like `proxy.request.request.read_request`."""
        in_flight = InFlightRequest(self._core.server_state.in_flight)
        with in_flight, self._core.bodies.share(client_of(request)) as share:
            proxy_request = await self._read(request, share)
        record = request[ACCESS_RECORD]
        record.client, record.path = proxy_request.client, request.path
        record.model, record.kind = proxy_request.model, proxy_request.kind
        record.status = HTTPStatus.OK
        is_own = visible_client(request) is not None
        found = self._estimator.estimate(proxy_request, is_own=is_own)
        names = client_names(self._core.loader, request)
        return json_response(estimate_json(found, lambda model: names.get(model) is not None))

    async def _read(self, request: web.BaseRequest, share: Share) -> ProxyRequest:
        body = await read_body(request, share)
        await check_complexity(body, share)
        names, named = client_names(self._core.loader, request), request.query.get("model")
        owner = cache_owner(request, share.settings)

        def read() -> ProxyRequest:
            kind = _kind(members_of(body), request.headers)
            return json_request(body, kind, named, names, share.settings, owner)

        found = await share.run(len(body), read)
        complete(found, request, request[RESPONSE_HEADERS]["X-Request-Id"], _PATH)
        return found


def _kind(members: Mapping[str, Any], headers: Mapping[str, str]) -> EndpointKind:
    """Return the kind of request that a body is for; raise BadRequest if it is none."""
    if "messages" in members:
        is_anthropic = "system" in members or _ANTHROPIC in headers
        return EndpointKind.MESSAGES if is_anthropic else EndpointKind.CHAT
    if "prompt" in members:
        return EndpointKind.COMPLETION
    if "input" in members:
        return EndpointKind.RESPONSES
    raise BadRequest("the body has neither messages nor a prompt; send that of a chat")


def estimate_json(estimate: Estimate, is_visible: Callable[[str], bool]) -> dict[str, object]:
    load = estimate.load
    return {
        "model": estimate.model,
        "instance": estimate.instance,
        "prompt_tokens": estimate.prompt_tokens,
        "cached_tokens": estimate.prompt_tokens - estimate.new_tokens,
        "queue_s": _round_seconds(estimate.queue_s),
        "must_load": not estimate.is_loaded,
        "load_s": 0.0 if estimate.is_loaded else _round_seconds(load.in_s) if load else None,
        "evicts": list(filter(is_visible, load.evicts)) if load else [],
        "refusal": load.refusal if load else None,
        "first_token_s": _round_seconds(estimate.first_token_s),
    }


def _round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


_RETRY_AFTER_S: Final = 5


class WarmEndpoint(Feature):
    """Prefills a prompt, given as a chat request.

    It loads no model, reaches no other machine, and changes only caches. One prompt at a time is
    prefilled per model, while no client needs its instances; it stops if its client disconnects.
    """

    def __init__(self, core: Core, warmer: PromptWarmer) -> None:
        self._core = core
        self._warmer = warmer
        self._prefilling: set[str] = set()

    def add_routes(self, routes: Routes) -> None:
        routes.add("/corral/v1/models/{id}/warm", post=self.answer)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer with the tokens that each instance prefilled.

        Raises:
            UnknownModel: No model here has the name.
            LimitExceeded: The prompt exceeds the limits of an engine.
            TooManyRequests: A prompt is already being prefilled for the model, or the key has used
                up its tokens.
            ContextTooLong: The prompt is longer than the key permits.
            ProxyError: See `PromptWarmer.warm` and `read_body`.
        """
        key = request[KEY]
        names = self._core.loader.names().local.visible(key.models if key else None)
        pick = names.resolve(request[PATH_ID])
        in_flight = InFlightRequest(self._core.server_state.in_flight)
        with in_flight, self._core.bodies.share(client_of(request)) as share:
            return await self._read(request, pick, share)

    async def _read(
        self, request: web.BaseRequest, pick: ResolvedModel, share: Share
    ) -> web.Response:
        members = await read_members(request, share)
        if pick.variant:
            members = pick.variant.apply_to(members)
        if adapters := pick.model_info.adapters:
            members = with_adapter(members, adapters, pick.adapter)
        check(EndpointKind.CHAT, members, share.settings.limits)
        model = pick.model_info.id
        if model in self._prefilling:
            message = f"{model} is already prefilling a prompt; retry later"
            raise TooManyRequests(message, _RETRY_AFTER_S)
        client, prompt = client_of(request), read_prompt(EndpointKind.CHAT, model, members)
        if cache_owner(request, share.settings).is_alone:
            raise Forbidden(
                'keys prefill no prompts where share_caches under [proxy] is "key": all keys '
                "could use them; send the prompt as a chat instead"
            )
        self._prefilling.add(model)
        try:
            with self._reserve_tokens(client, prompt, members):
                warmed = await self._warmer.warm(model, members)
        finally:
            self._prefilling.discard(model)
        for result in warmed:
            tokens = Tokens(result.tokens, result.cached_tokens, 1)
            self._core.router.charge(SlotUse(client, model, result.instance, tokens, 0.0))
        record = request[ACCESS_RECORD]
        record.client, record.path, record.model = client, request.path, model
        record.kind, record.priority, record.status = EndpointKind.CHAT, "batch", HTTPStatus.OK
        if prompt and visible_client(request) is not None:
            most = BLOCK_TOKENS * self._core.router.cache.recent.own_blocks(
                client_hash(model, client), prompt
            )
            warmed = [result.with_cached(most) for result in warmed]
        data = [
            {"instance": result.instance, "tokens": result.tokens, "cached": result.cached_tokens}
            for result in warmed
        ]
        return json_response({"data": data})

    def _reserve_tokens(
        self, client: str, prompt: Prompt | None, members: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        if (key := self._core.admission.keys.limited.get(client)) is None:
            return nullcontext()
        return self._core.admission.tokens.reserve(key, prompt.tokens if prompt else 0, members)
