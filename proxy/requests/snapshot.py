"""The requests in flight at one moment. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.access_log import AccessRecord
from proxy.router.instances import InstanceStats
from proxy.router.lease import LeaseStats
from proxy.router.open_request import OpenRequest

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
    oldest_first = sorted(requests, key=lambda one: one.began_at_s)
    names = [(request.client, request.record.request_id) for request in oldest_first]
    return [
        _stats(request, held[name], positions.get(name), now_s)
        for name, request in zip(names, oldest_first, strict=True)
    ]


def _stats(
    request: OpenRequest, held: Sequence[_Held], position: int | None, now_s: float
) -> RequestStats:
    record, leases = request.record, [one.lease for one in held]
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
        prompt_tokens=sum(one.prompt_total for one in leases) or None,
        prompt_tokens_done=sum(one.prompt_done for one in leases),
        cached_tokens=sum(one.cached for one in leases),
        decoded_tokens=sum(one.decoded for one in leases),
        tokens_per_second=round(sum(_rates(leases, now_s)), 2),
    )


def _phase(record: AccessRecord, leases: Sequence[LeaseStats], position: int | None) -> Phase:
    if record.timeline.is_stalled:
        return "stalled"
    phases = {one.phase for one in leases}
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
    for one in leases:
        if one.first_token_at_s is not None and one.decoded > 1 and now_s > one.first_token_at_s:
            yield (one.decoded - 1) / (now_s - one.first_token_at_s)
