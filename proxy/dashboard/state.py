"""The state that the page shows. Pure.

It has no null: what is unknown is left out. Times are seconds since the start of the daemon, so
that nothing changes only because time passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.dashboard.host import HostInstance, HostModel
from proxy.dashboard.slot_map import slots_of
from proxy.models import ModelInfo
from proxy.nodes.stats import NodeStats
from proxy.requests.snapshot import RequestStats
from proxy.router.instances import InstanceStats
from proxy.router.request_queue import QueueStats

State = dict[str, Any]

_ACTIONS: Final[Mapping[str, Sequence[str]]] = {
    "loaded": ("unload", "restart", "warm"),
    "loading": ("unload", "restart"),
    "unloaded": ("load",),
    "failed": ("load", "restart"),
}

_ELSEWHERE: Final = frozenset({"id", "age_s"})


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known at one moment.

    Attributes:
        now_s: Monotonic, as `started_at_s`.
        served: All instances that get requests, those of nodes included.
        caches: Prompt tokens `expected`, of these `found`; all that were found, of those from
            `disk`, and `computed`; by model.
    """

    now_s: float
    started_at_s: float
    server: Mapping[str, Any]
    model_infos: Sequence[ModelInfo] = ()
    models: Mapping[str, HostModel] = field(default_factory=dict)
    instances: Sequence[HostInstance] = ()
    served: Sequence[InstanceStats] = ()
    queues: Mapping[str, QueueStats] = field(default_factory=dict)
    requests: Sequence[RequestStats] = ()
    nodes: Sequence[NodeStats] = ()
    rates: Mapping[str, Any] = field(default_factory=dict)
    caches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def at_s(self, monotonic_s: float) -> float:
        return round(monotonic_s - self.started_at_s, 1)

    def in_s(self, seconds: float | None) -> float | None:
        """A time that is so far ahead."""
        return None if seconds is None else self.at_s(self.now_s + seconds)


def state_of(observed: Observed) -> State:
    return {
        "server": dict(observed.server),
        "models": {one.id: _model(one, observed) for one in observed.model_infos},
        "instances": {**_remote(observed), **_local(observed)},
        "requests": {one.id: _request(one, observed) for one in observed.requests},
        "nodes": {one.name: _node(one) for one in observed.nodes},
        "rates": dict(observed.rates),
        "caches": {model: dict(one) for model, one in observed.caches.items()},
    }


def _model(info: ModelInfo, observed: Observed) -> dict[str, Any]:
    host, queue = observed.models.get(info.id), observed.queues.get(info.id)
    own = [one for one in observed.instances if one.model == info.id]
    return _known(
        state=info.state,
        cause=info.reason,
        load_progress=info.load_progress,
        memory_bytes=sum(one.rss_bytes or 0 for one in own) or None,
        restarts=sum(one.restarts for one in own),
        context=info.context_length,
        slots=info.slots,
        aliases=list(info.aliases),
        profile=host.profile if host else None,
        is_local=info.is_local,
        actions=list(_ACTIONS[info.state]) if host else [],
        unload_at_s=observed.in_s(host.unload_in_s) if host else None,
        waiting=_waiting(host) if host else None,
        queue=_queue(queue, observed) if queue else {"length": 0},
    )


def _waiting(host: HostModel) -> dict[str, Any] | None:
    return None if host.place is None else {"place": host.place, "leaving": list(host.leaving)}


def _queue(queue: QueueStats, observed: Observed) -> dict[str, Any]:
    length = queue.interactive + queue.batch
    return _known(
        length=length,
        interactive=queue.interactive,
        batch=queue.batch,
        oldest_at_s=observed.in_s(-queue.oldest_wait_s) if length else None,
        expected_wait_s=round(queue.expected_wait_s, 1),
    )


def _local(observed: Observed) -> dict[str, Any]:
    served = {one.upstream.name: one for one in observed.served}
    return {one.name: _instance(one, served.get(one.name), observed) for one in observed.instances}


def _instance(one: HostInstance, served: InstanceStats | None, at: Observed) -> dict[str, Any]:
    return _known(
        model=one.model,
        state=one.state,
        since_at_s=at.at_s(one.since_s),
        run=one.run,
        restarts=one.restarts,
        is_retiring=one.is_retiring,
        pid=one.pid,
        rss_bytes=one.rss_bytes,
        retry_at_s=at.in_s(one.retry_in_s),
        load_progress=one.load_progress,
        engine=one.engine,
        error=dict(one.error) if one.error else None,
        warnings=list(one.warnings),
        **(_served(served, at) if served else {"slots": {}}),
    )


def _remote(observed: Observed) -> dict[str, Any]:
    """Models of nodes: each is one instance here."""
    return {
        one.upstream.name: {
            "model": one.upstream.model,
            "node": one.upstream.node.name,
            "state": "ready" if one.in_service else "draining",
            **_served(one, observed),
        }
        for one in observed.served
        if one.upstream.node
    }


def _served(one: InstanceStats, observed: Observed) -> dict[str, Any]:
    count = one.upstream.slots if one.in_service else 0
    return {
        "conversations": one.conversations,
        "prefill_tokens_per_second": round(one.prefill_tps, 1),
        "decode_tokens_per_second": round(one.decode_tps, 1),
        "slots": slots_of(one.leases, count, observed.started_at_s),
    }


def _request(one: RequestStats, observed: Observed) -> dict[str, Any]:
    members = {name: getattr(one, name) for name in one.__slots__ if name not in _ELSEWHERE}
    members["tokens_per_second"] = round(one.tokens_per_second, 1)
    return _known(**members, began_at_s=observed.in_s(-one.age_s))


def _node(one: NodeStats) -> dict[str, Any]:
    return _known(
        url=one.url,
        state=one.state,
        reason=one.problem,
        models=list(one.models),
        slots=one.slots,
        slots_busy=one.slots_busy,
    )


def caches_of(counts: Mapping[str, Iterable[tuple[str, float]]]) -> dict[str, dict[str, int]]:
    """The sums of counts by model: `{"found": [("chat", 3), ("chat", 4)]}` is 7 for chat."""
    found: dict[str, dict[str, int]] = {}
    for name, values in counts.items():
        for model, count in values:
            own = found.setdefault(model, dict.fromkeys(counts, 0))
            own[name] += int(count)
    return found


def _known(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}
