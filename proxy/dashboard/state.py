"""The state that the page shows, and the difference between two states. Pure.

It has no null: unknown members are left out, and in a difference, a JSON Merge Patch, null removes
a member. Times are seconds since the start of the daemon, so that nothing changes only because time
passes. `Rates` has the figures of each second of the last 15 minutes. Source: RFC 7396.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.dashboard.host import HostInstance, HostMemory, HostModel
from proxy.nodes.nodes import NodeStats
from proxy.observe.past import RequestStats
from proxy.request.models import ModelInfo
from proxy.router.lease import InstanceStats, LeaseStats, by_slot
from proxy.router.queue import QueueStats

Json = Mapping[str, Any]


def merge_patch(before: Json, after: Json) -> dict[str, Any]:
    """Return the patch that turns `before` into `after`; empty if they are equal."""
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if difference := merge_patch(old, value):
                patch[name] = difference
        elif old != value:
            patch[name] = value
    return patch


INTERVAL_S: Final = 1.0
_SAMPLES: Final = 900


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals since the start of ended requests; tokens include running requests."""

    decoded_tokens: float = 0.0
    prompt_tokens: float = 0.0
    # number of requests that got a first token; `first_tokens_s` is their total wait
    first_tokens: int = 0
    first_tokens_s: float = 0.0


# The figures of one second; `first_token_s` is the mean of requests that ended in it.
_FIGURES: Final = ("tokens_per_second", "prompt_tokens_per_second", "queued", "first_token_s")


def with_running(ended: Totals, instances: Iterable[InstanceStats]) -> Totals:
    """Add the tokens of running requests."""
    leases = (lease for instance in instances for lease in instance.leases)
    running = [lease for lease in leases if lease.phase != "ending"]
    return Totals(
        ended.decoded_tokens + sum(lease.decoded for lease in running),
        ended.prompt_tokens + sum(max(0, lease.prompt_done - lease.cached) for lease in running),
        ended.first_tokens,
        ended.first_tokens_s,
    )


# Samples after which totals below the last ones are believed: requests without an answer ended.
_DIPS_MAX: Final = 3


class Rates:
    """The latest samples. An ending request may be counted a moment late, but only once."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float | None, ...]] = deque(maxlen=_SAMPLES)
        self._before: Totals | None = None
        self._before_at_s = 0.0
        self._dips = 0

    def add(self, totals: Totals, queued: int, at_s: float) -> None:
        """Add a sample from the totals at a later time."""
        before, elapsed_s = self._before or totals, max(at_s - self._before_at_s, 1e-3)
        self._dips = self._dips + 1 if totals.decoded_tokens < before.decoded_tokens else 0
        if self._dips > _DIPS_MAX:
            before, self._dips = totals, 0
        first_tokens = totals.first_tokens - before.first_tokens
        decoded = max(totals.decoded_tokens, before.decoded_tokens)
        prompt = max(totals.prompt_tokens, before.prompt_tokens)
        waited_s = totals.first_tokens_s - before.first_tokens_s
        sample = (
            round((decoded - before.decoded_tokens) / elapsed_s, 1),
            round((prompt - before.prompt_tokens) / elapsed_s, 1),
            queued,
            round(waited_s / first_tokens, 3) if first_tokens > 0 else None,
        )
        self._samples.append(sample)
        self._before = Totals(decoded, prompt, totals.first_tokens, totals.first_tokens_s)
        self._before_at_s = at_s

    def latest(self) -> dict[str, Any]:
        if not self._samples:
            return {}
        members = dict(zip(_FIGURES, self._samples[-1], strict=True))
        return _without_none(at_s=int(self._before_at_s), **members)

    def history(self) -> dict[str, Any]:
        """Return all samples, as a list for each member."""
        columns = {name: [row[at] for row in self._samples] for at, name in enumerate(_FIGURES)}
        return {"at_s": int(self._before_at_s), "interval_s": INTERVAL_S, **columns}


def slots_of(leases: Sequence[LeaseStats], count: int, started_at_s: float) -> dict[str, Any]:
    """Return slots by number; a lease whose slot is unknown is shown in the first free slot.

    `count` is the number of all slots, `started_at_s` the origin of times.
    """
    placed = by_slot(leases, count)
    return {str(number): _slot(lease, started_at_s) for number, lease in placed.items()}


def _slot(lease: LeaseStats | None, started_at_s: float) -> dict[str, Any]:
    if lease is None:
        return {"phase": "idle"}
    return {
        "phase": lease.phase,
        "request": lease.request_id,
        "client": lease.client,
        "prompt_done": lease.prompt_done,
        "prompt_total": lease.prompt_total,
        "cached": lease.cached,
        "decoded": lease.decoded,
        "began_at_s": round(lease.began_at_s - started_at_s, 1),
    }


State = dict[str, Any]

_ACTIONS: Final[Mapping[str, Sequence[str]]] = {
    "loaded": ("unload", "restart", "warm"),
    "loading": ("unload", "restart"),
    "unloaded": ("load",),
    "failed": ("load", "restart"),
}


@dataclass(frozen=True, slots=True)
class Observed:
    now_s: float  # monotonic time, like `started_at_s`
    started_at_s: float
    server: Mapping[str, Any]
    model_infos: Sequence[ModelInfo] = ()
    models: Mapping[str, HostModel] = field(default_factory=dict)
    instances: Sequence[HostInstance] = ()
    served: Sequence[InstanceStats] = ()
    queues: Mapping[str, QueueStats] = field(default_factory=dict)
    requests: Sequence[RequestStats] = ()
    nodes: Sequence[NodeStats] = ()
    memory: Mapping[str, HostMemory] = field(default_factory=dict)
    devices: Sequence[Json] = ()
    rates: Mapping[str, Any] = field(default_factory=dict)
    # by model: prompt tokens expected in the cache, expected tokens found, tokens by the tier in
    # which they were found, computed tokens, and the seconds of computing that caches saved
    caches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def at_s(self, monotonic_s: float) -> float:
        return round(monotonic_s - self.started_at_s, 1)

    def time_in_s(self, seconds: float | None) -> float | None:
        return None if seconds is None else self.at_s(self.now_s + seconds)


def state_of(observed: Observed) -> State:
    return {
        "server": dict(observed.server),
        "models": {model.id: _model(model, observed) for model in observed.model_infos},
        "instances": {**_remote(observed), **_local(observed)},
        "requests": {request.id: _request(request, observed) for request in observed.requests},
        "nodes": {node.name: _node(node) for node in observed.nodes},
        "memory": {name: _fields(memory) for name, memory in observed.memory.items()},
        "devices": {str(device["id"]): dict(device) for device in observed.devices},
        "rates": dict(observed.rates),
        "caches": {model: dict(cache) for model, cache in observed.caches.items()},
    }


def _model(info: ModelInfo, observed: Observed) -> dict[str, Any]:
    host, queue = observed.models.get(info.id), observed.queues.get(info.id)
    own = [instance for instance in observed.instances if instance.model == info.id]
    return _without_none(
        state=info.state,
        cause=info.reason,
        load_progress=info.load_progress,
        memory_bytes=sum(instance.rss_bytes or 0 for instance in own) or None,
        restarts=sum(instance.restarts for instance in own),
        context=info.context_length,
        slots=info.slots,
        aliases=list(info.aliases),
        profile=host.profile if host else None,
        is_local=info.is_local,
        sees_images="image" in info.input_modalities or None,
        actions=list(_ACTIONS[info.state]) if host else [],
        unload_at_s=observed.time_in_s(host.unload_in_s) if host else None,
        waiting={"place": host.place, "leaving": list(host.leaving)}
        if host and host.place is not None
        else None,
        queue=_queue(queue, observed) if queue else {"length": 0},
    )


def _queue(queue: QueueStats, observed: Observed) -> dict[str, Any]:
    length = queue.interactive + queue.batch
    return _without_none(
        length=length,
        interactive=queue.interactive,
        batch=queue.batch,
        oldest_at_s=observed.time_in_s(-queue.oldest_wait_s) if length else None,
        expected_wait_s=round(queue.expected_wait_s, 1),
    )


def _local(observed: Observed) -> dict[str, Any]:
    served = {stats.upstream.name: stats for stats in observed.served}
    return {
        instance.name: _instance(instance, served.get(instance.name), observed)
        for instance in observed.instances
    }


def _instance(instance: HostInstance, served: InstanceStats | None, at: Observed) -> dict[str, Any]:
    return _without_none(
        **_fields(instance, "name", "since_s", "retry_in_s"),
        since_at_s=at.at_s(instance.since_s),
        retry_at_s=at.time_in_s(instance.retry_in_s),
        **(_traffic_members(served, at) if served else {"slots": {}}),
    )


def _remote(observed: Observed) -> dict[str, Any]:
    """Return the models of nodes, each as one instance."""
    return {
        stats.upstream.name: {
            "model": stats.upstream.model,
            "node": stats.upstream.node.name,
            "state": "ready" if stats.in_service else "draining",
            **_traffic_members(stats, observed),
        }
        for stats in observed.served
        if stats.upstream.node
    }


def _traffic_members(stats: InstanceStats, observed: Observed) -> dict[str, Any]:
    count = stats.upstream.slots if stats.in_service else 0
    return {
        "conversations": stats.conversations,
        "prefill_tokens_per_second": round(stats.prefill_tps, 1),
        "decode_tokens_per_second": round(stats.decode_tps, 1),
        "slots": slots_of(stats.leases, count, observed.started_at_s),
    }


def _request(request: RequestStats, observed: Observed) -> dict[str, Any]:
    members = _fields(request, "id", "age_s")
    members["tokens_per_second"] = round(request.tokens_per_second, 1)
    return _without_none(**members, began_at_s=observed.time_in_s(-request.age_s))


def _node(node: NodeStats) -> dict[str, Any]:
    return _without_none(**_fields(node, "name", "problem"), reason=node.problem)


def _fields(
    value: HostInstance | HostMemory | RequestStats | NodeStats, *without: str
) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__ if name not in without}


def caches_of(counts: Mapping[str, Iterable[tuple[str, float]]]) -> dict[str, dict[str, int]]:
    """Return sums by model: `{"found": [("chat", 3), ("chat", 4)]}` becomes 7 for chat."""
    found: dict[str, dict[str, int]] = {}
    for name, values in counts.items():
        for model, count in values:
            own = found.setdefault(model, dict.fromkeys(counts, 0))
            own[name] += int(count)
    return found


def _without_none(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}
