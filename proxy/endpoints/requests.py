"""`/corral/v1/requests`, `/corral/v1/usage` and `/corral/v1/estimate`.

Requests are in flight or past; clients see their own, admins all. Without API keys, the usage is
that of all clients. An estimate gives the time to a request's first token, without sending it: its
body is a chat, a text completion, or a request of Anthropic's or the Responses API.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final, Protocol

from aiohttp import web
from attrs import define
from prometheus_client import Metric

from proxy.auth.access import check_admin
from proxy.auth.api_keys import visible_client
from proxy.common.headers import RESPONSE_HEADERS
from proxy.endpoints.feature import Core, Feature
from proxy.endpoints.slots import decode_rate
from proxy.errors import BadRequest, NotFound, RequestCancelled, Unavailable
from proxy.http.body import Share, check_complexity, members_of, read_body
from proxy.http.middleware import ACCESS_RECORD, PATH_ID, Routes, json_response
from proxy.observe.explanation import explain, own_figures
from proxy.observe.past import (
    Conversations,
    HistoryQuery,
    Phase,
    RatesQuery,
    RequestHistory,
    RequestStats,
    StoredRequest,
    past_query,
)
from proxy.observe.record import AccessRecord, InFlightRequest, ServerState
from proxy.request.models import client_names
from proxy.request.request import (
    ProxyRequest,
    cache_owner,
    client_of,
    complete,
    json_request,
    prompt_change,
)
from proxy.router.estimator import Estimate, Estimator
from proxy.router.lease import InstanceStats, LeaseStats
from proxy.router.router import Router
from proxy.upstream.endpoint_kinds import EndpointKind


def snapshot(
    records: Iterable[AccessRecord],
    instances: Sequence[InstanceStats],
    positions: Mapping[tuple[str, str], int],
    now_s: float,
) -> list[RequestStats]:
    """Return the figures of requests, oldest first; `now_s` is monotonic.

    `positions` in the models' queues count from 1, by client and request id, because clients choose
    the ids.
    """
    leases: dict[tuple[str, str], list[LeaseStats]] = defaultdict(list)
    names_of_instances: dict[tuple[str, str], str] = {}
    for instance in instances:
        for lease in instance.leases:
            key = (lease.client, lease.request_id)
            leases[key].append(lease)
            names_of_instances.setdefault(key, instance.upstream.name)
    found = []
    for record in sorted(records, key=lambda record: record.timeline.began_at_s):
        name = record.client or "", record.request_id
        holder = names_of_instances.get(name)
        found.append(_stats(record, holder, leases[name], positions.get(name), now_s))
    return found


def _stats(
    record: AccessRecord,
    instance: str | None,
    leases: Sequence[LeaseStats],
    position: int | None,
    now_s: float,
) -> RequestStats:
    return RequestStats(
        id=record.request_id,
        client=record.client or "",
        path=record.path or "",
        model=record.model,
        instance=instance,
        slot=leases[0].id_slot if leases else None,
        priority=record.priority,
        phase=_phase(record, leases, position),
        position=None if leases else position,
        age_s=round(now_s - record.timeline.began_at_s, 3),
        prompt_tokens=sum(lease.prompt_total for lease in leases) or None,
        prompt_tokens_done=sum(lease.prompt_done for lease in leases),
        cached_tokens=sum(lease.cached for lease in leases),
        decoded_tokens=sum(lease.decoded for lease in leases),
        tokens_per_second=round(sum(decode_rate(lease, now_s) for lease in leases), 2),
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
    waits: Phase = "queued" if position else "loading"
    return "paused" if record.yields else waits


class Requests:
    def __init__(self, router: Router, server_state: ServerState) -> None:
        self._router = router
        self._server_state = server_state

    def stats(self, client: str | None = None) -> list[RequestStats]:
        """Return the requests in flight, oldest first; only those of `client` if given."""
        instances, positions = self._router.instances(), self._router.queues.positions()
        records = [record for _, record in self._in_flight(client)]
        return snapshot(records, instances, positions, time.monotonic())

    def models(self) -> set[str]:
        """Return the models with requests: of batches, and of clients, queued ones included."""
        instances = self._router.instances()
        leased = {instance.upstream.model for instance in instances if instance.leases}
        return leased | {request.model for request in self.stats() if request.model}

    def cancel(self, request_id: str, client: str | None = None) -> None:
        """End a request with an error, in any phase.

        Raises NotFound: no request in flight has the id, or it is another client's.
        """
        in_flight = self._in_flight(client)
        found = [request for request, record in in_flight if record.request_id == request_id]
        if not found:
            raise NotFound(f"no request in flight has the id {request_id}")
        for request in found:
            request.abort(RequestCancelled("the request was cancelled by an operator"))

    def _in_flight(self, client: str | None) -> Iterator[tuple[InFlightRequest, AccessRecord]]:
        for request in self._server_state.in_flight:
            record = request.record if request.is_listed else None
            if record and client in {None, record.client}:
                yield request, record


_PATH: Final = "/corral/v1/requests"
_IN_FLIGHT, _FINISHED = "in_flight", "finished"
_INTERVALS: Final = 180
_SPANS_S: Final = {"15m": 900, "6h": 21_600, "7d": 604_800}


@define(eq=False, slots=False)
class RequestsEndpoint(Feature):
    """The endpoints of requests; without a `history` there are no past requests."""

    _core: Core
    _requests: Requests
    _history: RequestHistory | None = None
    _conversations: Conversations | None = None

    def __attrs_post_init__(self) -> None:
        # Whether the prompts of a key may be found in another key's caches.
        self._shares_caches = self._core.settings.share_caches == "all"

    def add_routes(self, routes: Routes) -> None:
        """Add the routes; the last matches any path below, so it comes last."""
        routes.add(_PATH, get=self.list)
        routes.add("/corral/v1/rates", get=self.rates)
        routes.add("/corral/v1/caches/rates", get=self.cache_rates)
        routes.add(f"{_PATH}/{{id}}/cancel", post=self.cancel)
        routes.add(f"{_PATH}/{{id}}/explanation", get=self.explanation)
        routes.add(f"{_PATH}/{{id}}/conversation", delete=self.forget_conversation)
        routes.add(f"{_PATH}/{{id}}", get=self.show)

    async def list(self, request: web.BaseRequest) -> web.Response:
        """List requests in flight or past requests; raises BadRequest and StorageFailed."""
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
        return json_response({"requests": [self._visible_figures(past, client) for past in found]})

    async def rates(self, request: web.BaseRequest) -> web.Response:
        """Answer with figures of the past as equal intervals; raises BadRequest, StorageFailed."""
        query = _rates_query(request, visible_client(request))
        columns = await self._history.rates(query) if self._history else {}
        return json_response({"until": query.until, "interval_s": query.interval_s, **columns})

    async def cache_rates(self, request: web.BaseRequest) -> web.Response:
        """Answer an admin with the tokens of each cache over time; raises as `rates`."""
        check_admin(request)
        query = _rates_query(request)
        now = datetime.fromtimestamp(query.until).astimezone()
        day_s = (now - now.replace(hour=0, minute=0, second=0, microsecond=0)).total_seconds()
        models: Mapping[str, Any] = {}
        today: Mapping[str, Any] = {}
        if self._history:
            models = await self._history.cache_rates(query)
            today = await self._history.cache_rates(RatesQuery(query.until, max(1.0, day_s), 1))
        return json_response(
            {
                "until": query.until,
                "interval_s": query.interval_s,
                "models": models,
                "saved_today_s": {model: found["saved_s"][0] for model, found in today.items()},
            }
        )

    async def show(self, request: web.BaseRequest) -> web.Response:
        """Show a request; if several have its id, the latest.

        Raises:
            NotFound: No request has the id, or it is another client's.
            StorageFailed: Past requests cannot be read.
        """
        request_id, client = request[PATH_ID], visible_client(request)
        for running in self._requests.stats(client):
            if running.id == request_id:
                return json_response({"state": _IN_FLIGHT, **asdict(running)})
        ended = await self._past(request, f"no request has the id {request_id}")
        return json_response({"state": _FINISHED, **self._visible_figures(ended, client)})

    async def explanation(self, request: web.BaseRequest) -> web.Response:
        """Explain a past request; raises like `show`."""
        ended = self._visible_figures(await self._past(request), visible_client(request))
        return json_response(explain({**ended, "request": request[PATH_ID]}).as_json())

    async def forget_conversation(self, request: web.BaseRequest) -> web.Response:
        """Delete the caches of a request's conversation; raises like `show`."""
        request_id, ended = request[PATH_ID], await self._past(request)
        conversations = self._conversations
        if found := await conversations.forget_of(ended) if conversations else None:
            return json_response({"id": request_id, "forgotten": True, **asdict(found)})
        raise NotFound(f"the conversation of {request_id} is not known any more")

    async def cancel(self, request: web.BaseRequest) -> web.Response:
        self._requests.cancel(request[PATH_ID], visible_client(request))
        return json_response({"id": request[PATH_ID], "cancelled": True})

    async def _past(self, request: web.BaseRequest, otherwise: str = "") -> StoredRequest:
        """Return the latest past request of the path's id; raises NotFound, with `otherwise`."""
        request_id = request[PATH_ID]
        query = HistoryQuery(limit=1, request_id=request_id, client=visible_client(request))
        for ended in await self._history.requests(query) if self._history else ():
            return ended
        raise NotFound(otherwise or f"no request that has ended has the id {request_id}")

    def _visible_figures(self, ended: StoredRequest, client: str | None) -> StoredRequest:
        """Return the figures of a past request that `client` may see; None may see all."""
        return ended if client is None or not self._shares_caches else own_figures(ended)


def _rates_query(request: web.BaseRequest, client: str | None = None) -> RatesQuery:
    span = request.query.get("span", "")
    if span not in _SPANS_S:
        raise BadRequest(f"span must be one of {', '.join(_SPANS_S)}")
    until = datetime.now().astimezone().timestamp()
    return RatesQuery(until, _SPANS_S[span] / _INTERVALS, _INTERVALS, client)


_USAGE: Final = "/corral/v1/usage"
_USAGE_NAMES: Final = frozenset({"by", "since", "key", "model"})


class UsageReader(Protocol):
    async def usage(
        self,
        *,
        by: str | None = None,
        since: str | None = None,
        key: str | None = None,
        model: str | None = None,
    ) -> Sequence[Mapping[str, Any]]:
        """Return the sums of usage, one entry per name; `key` is the client's own or an admin's.

        Raises BadRequest: a parameter is invalid; Unavailable: the files cannot be read.
        """


class UsageEndpoint(Feature):
    """The endpoint; today's recorded usage counts towards the token limits of keys."""

    def __init__(self, core: Core, reader: UsageReader) -> None:
        self._core = core
        self._reader = reader

    async def prepare(self) -> None:
        if not self._core.settings.api_keys_file:
            return
        day = f"{datetime.now().astimezone():%Y-%m-%d}"
        try:
            found = await self._reader.usage(by="key", since=day)
        except Unavailable as error:
            self._core.metrics.emit("usage.record_failed", reason=error.message)
        else:
            tokens = {usage["key"]: usage["total_tokens"] for usage in found}
            self._core.admission.tokens.restore(day, tokens)

    def add_routes(self, routes: Routes) -> None:
        routes.add(_USAGE, get=self.usage)

    async def usage(self, request: web.BaseRequest) -> web.Response:
        given = dict(request.query)
        if unknown := sorted(given.keys() - _USAGE_NAMES):
            names = ", ".join(sorted(_USAGE_NAMES))
            raise BadRequest(f"unknown parameter {unknown[0]!r}; expected {names}")
        if (client := visible_client(request)) is not None:
            given["key"] = client
        return json_response({"usage": list(await self._reader.usage(**given))})


_ESTIMATE: Final = "/corral/v1/estimate"
_ANTHROPIC: Final = "anthropic-version"


class EstimateEndpoint(Feature):
    def __init__(self, core: Core, estimator: Estimator) -> None:
        self._core = core
        self._estimator = estimator

    def add_routes(self, routes: Routes) -> None:
        routes.add(_ESTIMATE, post=self.answer)

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
        found = self._estimator.estimate(proxy_request, is_own=visible_client(request) is not None)
        names = client_names(self._core.loader, request)
        return json_response(estimate_json(found, lambda model: names.get(model) is not None))

    async def _read(self, request: web.BaseRequest, share: Share) -> ProxyRequest:
        body = await read_body(request, share)
        await check_complexity(body, share)
        names, named = client_names(self._core.loader, request), request.query.get("model")
        owner, change = cache_owner(request, share.settings), prompt_change(request, names)

        def read() -> ProxyRequest:
            kind = _kind(members_of(body), request.headers)
            return json_request(body, kind, named, names, share.settings, owner, change)

        found = await share.run(len(body), read)
        complete(found, request, request[RESPONSE_HEADERS]["X-Request-Id"], _ESTIMATE)
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
        "group": load.group if load else None,
        "refusal": load.refusal if load else None,
        "first_token_s": _round_seconds(estimate.first_token_s),
    }


def _round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
