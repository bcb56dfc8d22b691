"""`/v1/responses`: continues, shows and deletes stored responses.

Source: OpenAI's API reference, "Get a model response", "Delete a model response", "List input
items".
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from proxy.apis.forwarded import ForwardedEndpoints
from proxy.auth.api_keys import KEY
from proxy.batches.api_objects import limit_of, order_of, page_object
from proxy.endpoints.feature import Feature
from proxy.errors import BadRequest, NotFound, quote
from proxy.forward.response import ClientResponse
from proxy.http.body import Share
from proxy.http.middleware import PATH_ID, Routes, json_response
from proxy.request.engine_members import engine_members
from proxy.request.models import ModelNames
from proxy.request.request import Translation
from proxy.request.stored_responses import ResponseStore, StoredResponse, StoredTurn
from proxy.upstream.endpoint_kinds import EndpointKind, endpoint_kind

PATHS: Final = ("/v1/responses", "/responses")
_COUNTED: Final = "/input_tokens"
_ITEMS_DEFAULT: Final = 20
_ITEMS_MAX: Final = 100


class ResponsesEndpoint(Feature):
    """Answers the endpoints; a client sees only the responses of its own API key."""

    def __init__(self, forwarded: ForwardedEndpoints, store: ResponseStore) -> None:
        self._forwarded = forwarded
        self._store = store

    def add_routes(self, routes: Routes) -> None:
        for path in PATHS:
            for posted in (path, path + _COUNTED):
                routes.add(posted, post=self.create)
            routes.add(path + "/{id}/input_items", get=self.list_input_items)
            routes.add(path + "/{id}", get=self.show, delete=self.delete)

    async def create(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._forwarded.answer_with(self._serve, request)

    async def show(self, request: web.BaseRequest) -> web.Response:
        if request.query.get("stream") == "true":
            raise BadRequest("a stored response cannot be streamed again; leave out stream")
        response = self._find(request).turn.response
        return web.Response(body=response, content_type="application/json")

    async def list_input_items(self, request: web.BaseRequest) -> web.Response:
        limit = limit_of(request.query, _ITEMS_DEFAULT, _ITEMS_MAX)
        items = self._find(request).input_items()
        if order_of(request.query) == "desc":
            items.reverse()
        if after := request.query.get("after"):
            ids = [item.get("id") for item in items]
            if after not in ids:
                raise BadRequest(f"after: no input item of this response has id {quote(after)}")
            items = items[ids.index(after) + 1 :]
        return json_response(page_object(items, items[:limit]))

    async def delete(self, request: web.BaseRequest) -> web.Response:
        stored = self._find(request)
        self._store.delete(_owner(request), stored.id)
        return json_response({"id": stored.id, "object": "response", "deleted": True})

    async def _serve(
        self,
        request: web.BaseRequest,
        answer: ClientResponse,
        share: Share,
        names: ModelNames,
    ) -> None:
        self._store.trim()
        turn = StoredTurn(self._store, _owner(request), share.settings.max_body_bytes)
        kind = endpoint_kind("POST", request.path)

        def translate(given: dict[str, Any]) -> dict[str, Any]:
            members = turn.members(given)
            return members if kind is EndpointKind.RESPONSES else engine_members(members)

        translation = Translation(request.path, kind, translate, turn.size_bytes)
        await self._forwarded.serve(
            request, answer, share, names, translation=translation, turn=turn
        )

    def _find(self, request: web.BaseRequest) -> StoredResponse:
        response_id = request[PATH_ID]
        if stored := self._store.find(_owner(request), response_id):
            return stored
        hint = "" if self._store.settings.enabled else _OFF
        raise NotFound(f"Response with id {quote(response_id)} not found.{hint}")


_OFF: Final = " Stored responses are off; set enabled = true under [proxy.stored_responses]."


def _owner(request: web.BaseRequest) -> str:
    key = request[KEY]
    return key.name if key else ""
