"""`/corral/v1/requests`: a client's own requests, in flight or ended; to an admin, everybody's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from aiohttp import web

from proxy.auth.api_keys import visible_client
from proxy.errors import BadRequest, NotFound
from proxy.explanation.explanation import explain, own_figures
from proxy.json_response import json_response
from proxy.requests.conversations import Conversations
from proxy.requests.history import HistoryQuery, RequestHistory, StoredRequest
from proxy.requests.past_query import past_query
from proxy.requests.requests import Requests
from proxy.routes import PATH_ID, Routes

_PATH: Final = "/corral/v1/requests"
_IN_FLIGHT, _FINISHED = "in_flight", "finished"


class RequestsEndpoint:
    """The endpoints.

    Args:
        requests: Those in flight.
        history: Those that ended; None: none is kept.
        conversations: Those of all.
        shares_caches: Whether prompts of one key may be found in what another one left.
    """

    def __init__(
        self,
        requests: Requests,
        history: RequestHistory | None = None,
        conversations: Conversations | None = None,
        *,
        shares_caches: bool = True,
    ) -> None:
        self._shares_caches = shares_caches
        self._requests = requests
        self._history = history
        self._conversations = conversations

    def add_routes(self, routes: Routes) -> None:
        """Add them; the last stands for any path below, so others come before it."""
        routes.add(_PATH, get=self.list)
        routes.add(f"{_PATH}/{{id}}/cancel", post=self.cancel)
        routes.add(f"{_PATH}/{{id}}/explanation", get=self.explanation)
        routes.add(f"{_PATH}/{{id}}/conversation", delete=self.forget_conversation)
        routes.add(f"{_PATH}/{{id}}", get=self.one)

    async def list(self, request: web.BaseRequest) -> web.Response:
        """Raises BadRequest, StorageFailed."""
        state = request.query.get("state", _IN_FLIGHT)
        if state not in {_IN_FLIGHT, _FINISHED}:
            raise BadRequest(f"state must be {_IN_FLIGHT} or {_FINISHED}")
        client = visible_client(request)
        if state == _IN_FLIGHT:
            return json_response(
                {"requests": [asdict(one) for one in self._requests.stats(client)]}
            )
        query = past_query(request.query, client)
        found = await self._history.requests(query) if self._history else ()
        return json_response({"requests": [self._shown(past, client) for past in found]})

    async def one(self, request: web.BaseRequest) -> web.Response:
        """Answer with the figures of a request; of several with its id, the latest.

        Raises:
            NotFound: None has it, or it is another client's.
            StorageFailed: Those that ended cannot be read.
        """
        request_id, client = request[PATH_ID], visible_client(request)
        for running in self._requests.stats(client):
            if running.id == request_id:
                return json_response({"state": _IN_FLIGHT, **asdict(running)})
        query = HistoryQuery(limit=1, request_id=request_id, client=client)
        for ended in await self._history.requests(query) if self._history else ():
            return json_response({"state": _FINISHED, **self._shown(ended, client)})
        raise NotFound(f"no request has the id {request_id}")

    async def explanation(self, request: web.BaseRequest) -> web.Response:
        """Explain a request that has ended; raises as `one` does."""
        request_id, client = request[PATH_ID], visible_client(request)
        query = HistoryQuery(limit=1, request_id=request_id, client=client)
        for ended in await self._history.requests(query) if self._history else ():
            return json_response(
                explain({**self._shown(ended, client), "request": request_id}).as_json()
            )
        raise NotFound(f"no request that has ended has the id {request_id}")

    async def forget_conversation(self, request: web.BaseRequest) -> web.Response:
        """Delete the caches of the conversation of a request; raises as `one` does."""
        request_id, client = request[PATH_ID], visible_client(request)
        query = HistoryQuery(limit=1, request_id=request_id, client=client)
        for ended in await self._history.requests(query) if self._history else ():
            conversations = self._conversations
            if found := await conversations.forget_of(ended) if conversations else None:
                return json_response({"id": request_id, "forgotten": True, **asdict(found)})
            raise NotFound(f"the conversation of {request_id} is not known any more")
        raise NotFound(f"no request that has ended has the id {request_id}")

    async def cancel(self, request: web.BaseRequest) -> web.Response:
        """Raises NotFound."""
        self._requests.cancel(request[PATH_ID], visible_client(request))
        return json_response({"id": request[PATH_ID], "cancelled": True})

    def _shown(self, ended: StoredRequest, client: str | None) -> StoredRequest:
        """Return the figures of a request that a client may see; None: it may see all."""
        return ended if client is None or not self._shares_caches else own_figures(ended)
