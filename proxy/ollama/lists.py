"""`/api/tags`, `/api/ps` and `/api/show`: the models that a client may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from proxy.auth.api_keys import client_models
from proxy.body.bodies import Bodies
from proxy.json_response import json_response
from proxy.models import ModelInfo, ModelLoader, ModelNames, with_variants
from proxy.ollama import entries
from proxy.ollama.files import members_in
from proxy.ollama.host import ModelDetails, OllamaHost
from proxy.ollama.names import required_name, untagged
from proxy.request import client_of

_NO_DETAILS: Final = ModelDetails()


class ModelLists:
    def __init__(self, loader: ModelLoader, host: OllamaHost, bodies: Bodies) -> None:
        self._loader = loader
        self._host = host
        self._bodies = bodies

    async def tags(self, request: web.BaseRequest) -> web.Response:
        models = with_variants(client_models(self._loader, request))
        details = await self._details(models)
        return json_response(
            {"models": [entries.tag(one, details.get(_of(one), _NO_DETAILS)) for one in models]}
        )

    async def running(self, request: web.BaseRequest) -> web.Response:
        models = [one for one in client_models(self._loader, request) if one.state == "loaded"]
        details, now = await self._details(models), datetime.now(tz=UTC)
        listed = [
            entries.running(
                one, details.get(one.id, _NO_DETAILS), self._host.residence(one.id), now
            )
            for one in models
        ]
        return json_response({"models": listed})

    async def show(self, request: web.BaseRequest) -> web.Response:
        with self._bodies.share(client_of(request)) as share:
            name = required_name(await members_in(request, share))
        names = ModelNames(with_variants(client_models(self._loader, request)))
        found = names.resolve(untagged(name, names)).model_info
        details = await self._details([found])
        return json_response(entries.show(found, details.get(_of(found), _NO_DETAILS)))

    async def _details(self, models: Sequence[ModelInfo]) -> Mapping[str, ModelDetails]:
        names = {_of(one) for one in models if one.is_local}
        return await self._host.details(sorted(names))


def _of(model_info: ModelInfo) -> str:
    """Return the model that an entry of a list belongs to."""
    return model_info.variant_of or model_info.id
