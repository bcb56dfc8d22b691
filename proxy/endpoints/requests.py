"""`/corral/v1/requests`: a client's own requests, in flight or ended; to an admin, everybody's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from aiohttp import web

from proxy.auth.api_keys import visible_client
from proxy.errors import BadRequest, NotFound, RequestCancelled
from proxy.http.middleware import PATH_ID, Routes, json_response
from proxy.observe.explanation import explain, own_figures
from proxy.observe.in_flight import InFlightRequest, OpenRequest, ServerState
from proxy.observe.past import (
    Conversations,
    HistoryQuery,
    RequestHistory,
    StoredRequest,
    past_query,
)
from proxy.observe.record import AccessRecord
from proxy.router.lease import InstanceStats, LeaseStats
from proxy.router.router import Router

# `reading`: the body has yet to arrive; `stalled`: the client has yet to take what was sent;
# `ending`: the engine has yet to confirm an idle slot.
Phase = Literal["reading", "queued", "loading", "prefill", "decode", "stalled", "ending"]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request.

    Attributes:
        client: The name of its API key, or its address.
        phase: Of a request in several slots, that of the furthest.
        position: In the queue, from 1; None unless it is queued.
        slot: The engine's `id_slot`; None where the engine chose, or before.
        prompt_tokens: An estimate until the engine reports it; None before it has a slot.
        prompt_tokens_done: Computed or found in the cache (`cached_tokens`).
        tokens_per_second: Generated, since the first token.
    """

    id: str
    client: str
    path: str
    model: str | None
    instance: str | None
    slot: int | None
    priority: str
    phase: Phase
    position: int | None
    age_s: float
    prompt_tokens: int | None
    prompt_tokens_done: int
    cached_tokens: int
    decoded_tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class _Held:
    """A slot that a request has."""

    instance: str
    lease: LeaseStats


def snapshot(
    requests: Iterable[OpenRequest],
    instances: Sequence[InstanceStats],
    positions: Mapping[tuple[str, str], int],
    now_s: float,
) -> list[RequestStats]:
    """The requests, oldest first.

    Args:
        requests: In flight.
        instances: All of the router.
        positions: In the queue of its model, by client and request id, from 1: ids are names that
            clients give.
        now_s: Monotonic.
    """
    held: dict[tuple[str, str], list[_Held]] = defaultdict(list)
    for instance in instances:
        for lease in instance.leases:
            held[lease.client, lease.request_id].append(_Held(instance.upstream.name, lease))
    oldest_first = sorted(requests, key=lambda request: request.began_at_s)
    names = [(request.client, request.record.request_id) for request in oldest_first]
    return [
        _stats(request, held[name], positions.get(name), now_s)
        for name, request in zip(names, oldest_first, strict=True)
    ]


def _stats(
    request: OpenRequest, held: Sequence[_Held], position: int | None, now_s: float
) -> RequestStats:
    record, leases = request.record, [in_flight.lease for in_flight in held]
    first = held[0] if held else None
    return RequestStats(
        id=record.request_id,
        client=request.client,
        path=request.path,
        model=record.model,
        instance=first.instance if first else None,
        slot=first.lease.id_slot if first else None,
        priority=record.priority,
        phase=_phase(record, leases, position),
        position=None if leases else position,
        age_s=round(now_s - request.began_at_s, 3),
        prompt_tokens=sum(lease.prompt_total for lease in leases) or None,
        prompt_tokens_done=sum(lease.prompt_done for lease in leases),
        cached_tokens=sum(lease.cached for lease in leases),
        decoded_tokens=sum(lease.decoded for lease in leases),
        tokens_per_second=round(sum(_rates(leases, now_s)), 2),
    )


def _phase(record: AccessRecord, leases: Sequence[LeaseStats], position: int | None) -> Phase:
    if record.timeline.is_stalled:
        return "stalled"
    phases = {lease.phase for lease in leases}
    if "decode" in phases:
        return "decode"
    if "prefill" in phases:
        return "prefill"
    if phases:
        return "ending"
    if record.model is None:
        return "reading"
    return "queued" if position else "loading"


def _rates(leases: Iterable[LeaseStats], now_s: float) -> Iterator[float]:
    for lease in leases:
        if (
            lease.first_token_at_s is not None
            and lease.decoded > 1
            and now_s > lease.first_token_at_s
        ):
            yield (lease.decoded - 1) / (now_s - lease.first_token_at_s)


class Requests:
    def __init__(self, router: Router, server_state: ServerState) -> None:
        self._router = router
        self._server_state = server_state

    def stats(self, client: str | None = None) -> list[RequestStats]:
        """The requests in flight, oldest first; of one client, where one is given."""
        instances, positions = self._router.instances(), self._router.queue_positions()
        requests = [what for _, what in self._in_flight(client)]
        return snapshot(requests, instances, positions, time.monotonic())

    def cancel(self, request_id: str, client: str | None = None) -> None:
        """End a request with an error, in whatever phase it is.

        Raises:
            NotFound: None in flight has the id, or it is another client's.
        """
        found = [
            request
            for request, what in self._in_flight(client)
            if what.record.request_id == request_id
        ]
        if not found:
            raise NotFound(f"no request in flight has the id {request_id}")
        for request in found:
            request.abort(RequestCancelled("the request was cancelled by an operator"))

    def _in_flight(self, client: str | None) -> Iterator[tuple[InFlightRequest, OpenRequest]]:
        for request in self._server_state.in_flight:
            if request.open_request and client in {None, request.open_request.client}:
                yield request, request.open_request


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
                {"requests": [asdict(request) for request in self._requests.stats(client)]}
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
