"""The endpoint that prefills a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from proxy.adapter import with_adapter
from proxy.auth.admission import Admission
from proxy.auth.api_keys import KEY, visible_client
from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.endpoints import EndpointKind
from proxy.errors import Forbidden, TooManyRequests
from proxy.json_response import json_response
from proxy.middleware import ACCESS_RECORD
from proxy.models import ModelLoader, PromptWarmer, ResolvedModel
from proxy.prompt_cache.prompt import BLOCK_TOKENS, Prompt, read_prompt
from proxy.request import cache_owner, client_of
from proxy.request_limits.check import check
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.router.router import Router
from proxy.router.slot_use import SlotUse, Tokens
from proxy.routes import PATH_ID, Routes

_RETRY_AFTER_S: Final = 5


class WarmEndpoint:
    """Prefills a prompt, given as a chat request.

    It loads no model, reaches no other machine, and changes only caches. One prompt at a time is
    prefilled for a model, while no client needs its instances; a client that leaves ends it.
    """

    def __init__(
        self,
        loader: ModelLoader,
        warmer: PromptWarmer,
        server_state: ServerState,
        bodies: Bodies,
        admission: Admission,
        router: Router,
    ) -> None:
        self._admission = admission
        self._router = router
        self._loader = loader
        self._warmer = warmer
        self._server_state = server_state
        self._bodies = bodies
        self._prefilling: set[str] = set()

    def add_routes(self, routes: Routes) -> None:
        routes.add("/corral/v1/models/{id}/warm", post=self.answer)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer with the tokens that each instance prefilled.

        Raises:
            UnknownModel: No model here has the name.
            LimitExceeded: The prompt exceeds the limits of an engine.
            TooManyRequests: A prompt is being prefilled for the model already, or the key has used
                up its tokens.
            ContextTooLong: The prompt is longer than the key may send.
            ProxyError: As `PromptWarmer.warm` and `read_body` do.
        """
        key = request[KEY]
        names = self._loader.names().local.visible(key.models if key else None)
        pick = names.resolve(request[PATH_ID])
        in_flight = InFlightRequest(self._server_state.in_flight)
        with in_flight, self._bodies.share(client_of(request)) as share:
            return await self._read(request, pick, share)

    async def _read(
        self, request: web.BaseRequest, pick: ResolvedModel, share: Share
    ) -> web.Response:
        body = await read_body(request, share)
        await check_complexity(body, share)
        members = await share.run(len(body), lambda: members_of(body))
        if pick.variant:
            members = pick.variant.applied(members)
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
            with self._reserved(client, prompt, members):
                warmed = await self._warmer.warm(model, members)
        finally:
            self._prefilling.discard(model)
        for result in warmed:
            tokens = Tokens(result.tokens, result.cached_tokens, 1)
            self._router.charge(SlotUse(client, model, result.instance, tokens, 0.0))
        record = request[ACCESS_RECORD]
        record.client, record.path, record.model = client, request.path, model
        record.kind, record.priority, record.status = EndpointKind.CHAT, "batch", HTTPStatus.OK
        if prompt and visible_client(request) is not None:
            most = BLOCK_TOKENS * self._router.own_blocks(model, client, prompt)
            warmed = [result.with_cached(most) for result in warmed]
        data = [
            {"instance": result.instance, "tokens": result.tokens, "cached": result.cached_tokens}
            for result in warmed
        ]
        return json_response({"data": data})

    def _reserved(
        self, client: str, prompt: Prompt | None, members: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        if (key := self._admission.keys.limited.get(client)) is None:
            return nullcontext()
        return self._admission.tokens.reserved(key, prompt.tokens if prompt else 0, members)
