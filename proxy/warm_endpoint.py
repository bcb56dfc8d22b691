"""The endpoint that prefills a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from proxy.adapter import with_adapter
from proxy.auth.admission import Admission
from proxy.auth.api_keys import KEY
from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.endpoints import EndpointKind
from proxy.errors import TooManyRequests
from proxy.json_response import json_response
from proxy.middleware import ACCESS_RECORD
from proxy.models import ModelLoader, PromptWarmer, ResolvedModel
from proxy.prompt_cache.prompt import read_prompt
from proxy.request import client_of
from proxy.request_limits.check import check
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.router.slot_use import SlotUse, Tokens
from proxy.routes import PATH_ID, Routes

_RETRY_AFTER_S: Final = 5


class WarmEndpoint:
    """Prefills a prompt, given as a chat request; `charge` is told what that took.

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
        charge: Callable[[SlotUse], None],
    ) -> None:
        self._admission = admission
        self._charge = charge
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
        client, record = client_of(request), request[ACCESS_RECORD]
        self._prefilling.add(model)
        try:
            with self._reserved(client, model, members):
                warmed = await self._warmer.warm(model, members)
        finally:
            self._prefilling.discard(model)
        for one in warmed:
            tokens = Tokens(one.tokens, one.cached_tokens, 1)
            self._charge(SlotUse(client, model, one.instance, tokens, 0.0))
        record.client, record.path, record.model = client, request.path, model
        record.kind, record.priority, record.status = EndpointKind.CHAT, "batch", HTTPStatus.OK
        data = [
            {"instance": one.instance, "tokens": one.tokens, "cached": one.cached_tokens}
            for one in warmed
        ]
        return json_response({"data": data})

    def _reserved(
        self, client: str, model: str, members: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        key, prompt = (
            self._admission.keys.limited.get(client),
            read_prompt(EndpointKind.CHAT, model, members),
        )
        if key is None:
            return nullcontext()
        return self._admission.tokens.reserved(key, prompt.tokens if prompt else 0, members)
