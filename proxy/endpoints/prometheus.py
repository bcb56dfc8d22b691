"""`/metrics` for Prometheus: request counters, gauges of the router, and the engines' metrics.

A request costs one count at its end; everything else is computed when the endpoint is read. The
prompt cache has three tiers: slot, host cache, slot file.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from prometheus_client import Metric, ProcessCollector

from proxy.cache.save_policy import OperationCounts
from proxy.common.background_tasks import FAILURES
from proxy.endpoints.slots import SlotTotals, all_slots, totals_of
from proxy.observe import metrics
from proxy.observe.metrics import counter, gauge, histogram
from proxy.observe.record import InFlight, InFlightRequest, Report
from proxy.request.models import ModelInfo
from proxy.router.lease import InstanceStats
from proxy.router.next_turns import NextTurnCounts
from proxy.router.queue import QueueStats
from proxy.router.router import Router
from proxy.router.slots import TierUse
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Upstream

_BY_TIER: Final[Mapping[str, Callable[[TierUse], float]]] = {
    "prompts_by_tier": lambda use: use.prompts,
    "prompt_tokens_by_tier": lambda use: use.tokens,
    "prefill_saved_seconds": lambda use: use.saved_s,
}
_BY_OPERATION: Final[Mapping[str, Callable[[OperationCounts], float]]] = {
    "slot_file_operations": lambda counts: counts.done,
    "slot_file_failures": lambda counts: counts.failures,
    "slot_file_tokens": lambda counts: counts.tokens,
    "slot_file_bytes": lambda counts: counts.size_bytes,
    "slot_file_seconds": lambda counts: counts.duration_s,
}
_AHEAD: Final[Mapping[str, Callable[[NextTurnCounts], float]]] = {
    "next_turns_computed": lambda counts: counts.computed,
    "next_turns_aborted": lambda counts: counts.aborted,
    "next_turn_seconds": lambda counts: counts.duration_s,
}


def cache_metrics(router: Router) -> Iterator[Metric]:
    """Yield the counters of caches and slot files since the start."""
    uses, storage = router.cache_use.models, router.storage.counts
    for name, of_tier in _BY_TIER.items():
        by_tier = {(model, tier): of_tier(use[tier]) for model, use in uses.items() for tier in use}
        yield counter(name, by_tier)
    for name, of_operation in _BY_OPERATION.items():
        done = {
            (model, operation): of_operation(counts[operation])
            for model, counts in storage.items()
            for operation in counts
        }
        yield counter(name, done)
    skipped = dict(router.saves_skipped.items())
    yield counter("slot_file_saves_skipped", skipped)
    ahead = router.next_turns.counts
    for name, of_model in _AHEAD.items():
        values = {(model,): of_model(counts) for model, counts in ahead.items()}
        yield counter(name, values)
    tokens = {
        (model, result): count
        for model, counts in ahead.items()
        for result, count in (
            ("computed", counts.computed_tokens),
            ("used", counts.used_tokens),
            ("missed", counts.missed_tokens),
        )
    }
    yield counter("next_turn_tokens", tokens)
    holds = {model: queue.holds for model, queue in router.queues.items()}
    ended = {
        (model, result): count
        for model, its in holds.items()
        for result, count in its.counts.items()
    }
    yield counter("slot_holds", ended)
    yield counter("slot_hold_seconds", {(model,): its.held_s for model, its in holds.items()})


_ENDS: Final = ("requests_finished", "requests_failed", "requests_cancelled")
# An engine answers only between two passes; `/corral/v1/slots` should seldom wait for that.
_PASSES_AGE_MAX_S: Final = 10.0

_OF_INSTANCE: Final[Mapping[str, Callable[[InstanceStats, SlotTotals], float]]] = {
    "slots": lambda _, totals: totals.num_slots,
    "slots_prefill": lambda _, totals: totals.num_prefill,
    "slots_decode": lambda _, totals: totals.num_decode,
    "slots_held": lambda _, totals: totals.num_held,
    "conversations": lambda instance, _: instance.conversations,
    "prefill_tokens_per_second": lambda instance, _: instance.prefill_tps,
    "decode_tokens_per_second": lambda instance, _: instance.decode_tps,
    "routing_weight": lambda instance, _: instance.weight.value,
}


class Metrics:
    """Counts events and renders `/metrics`."""

    def __init__(
        self, settings: ProxySettings, report: Report, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._counters = metrics.RequestCounters(report)
        # Takes an event and its fields as they are; `emit` takes them by name.
        self.report = self._counters.report
        self._scrape = metrics.Scrape(settings, clock)
        self._process = ProcessCollector(registry=None)
        self._others: list[Callable[[], Iterable[Metric]]] = []

    def add(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._others.append(collect)

    def emit(self, name: str, /, **fields: object) -> None:
        self.report(name, fields)

    def counts(self, name: str) -> Mapping[tuple[str, ...], float]:
        """Return a counter of requests by labels; the first label is the model."""
        return self._counters.counts[name]

    def histograms(self, name: str) -> Collection[metrics.Histogram]:
        return self._counters.histograms[name].values()

    async def render(
        self,
        accept: str,
        model_infos: Sequence[ModelInfo],
        router: Router,
        in_flight: InFlight[InFlightRequest],
        client: str | None = None,
    ) -> tuple[bytes, str]:
        """Return the body for these models, and its content type: plain text or OpenMetrics.

        `client` is the only client whose figures may be seen; None for all.
        """
        readings = await self._scrape.expose(_engines(router))
        encode, content_type = metrics.encoder(accept)
        models = {model_info.id for model_info in model_infos}
        found = VisibleMetrics(self._collect(readings, router, in_flight), models, client)
        return encode(found), content_type

    async def passes(self, router: Router) -> Mapping[str, metrics.Passes]:
        """Return the engines' recent passes, by instance; takes at most a second."""
        readings = await self._scrape.read(_engines(router), _PASSES_AGE_MAX_S)
        found = {reading.upstream.name: metrics.passes_of(reading) for reading in readings}
        return {name: passes for name, passes in found.items() if passes}

    async def engine_values(
        self, router: Router, wait_s: float
    ) -> Mapping[str, Mapping[str, float]]:
        """Return the engines' unlabelled metrics by instance; a busy engine's are its latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._scrape.read(_engines(router))
        return self._scrape.values

    def _collect(
        self,
        readings: Sequence[metrics.Scraped],
        router: Router,
        in_flight: Iterable[InFlightRequest],
    ) -> Iterator[Metric]:
        instances = router.instances()
        for instance in instances:
            self._counters.begin(instance.upstream.model, instance.upstream.name)
        counts = self._counters.counts
        yield from self._requests(instances, in_flight, counts)
        for name in metrics.COUNTERS:
            yield counter(name, counts[name])
        failures = {(task,): count for task, count in FAILURES.counts.items()}
        yield counter("task_failures", failures)
        yield from cache_metrics(router)
        for name, bounds in metrics.HISTOGRAMS.items():
            yield histogram(name, bounds, self._counters.histograms[name])
        yield from _queues(router.queues.stats())
        yield from _instances(instances, self._clock())
        yield _kv_cache(instances)
        is_read = {_labels(reading.upstream): float(bool(reading.families)) for reading in readings}
        yield gauge("engine_scrape_success", is_read)
        yield from metrics.merge_families(
            family for reading in readings for family in reading.families
        )
        for collect in self._others:
            yield from collect()
        yield from self._process.collect()

    def _requests(
        self,
        instances: Iterable[InstanceStats],
        requests: Iterable[InFlightRequest],
        counts: Mapping[str, Mapping[tuple[str, ...], int]],
    ) -> Iterator[Metric]:
        labels_of = self._counters.labels_of
        upstreams = (instance.upstream for instance in instances)
        in_flight = Counter({labels_of(upstream.model, upstream.name): 0 for upstream in upstreams})
        records = (request.record for request in requests)
        in_flight.update(
            labels_of(record.model, record.instance)
            for record in records
            if record and record.instance
        )
        # By model alone, because a retry moves a request to another instance.
        accepted = Counter[tuple[str, ...]]()
        for ended in (in_flight, *(counts[end] for end in _ENDS)):
            for (model, _), count in ended.items():
                accepted[model,] += count
        yield counter("requests_accepted", accepted)
        yield gauge("requests_in_flight", in_flight)


def _engines(router: Router) -> list[Upstream]:
    """Return the engines in service; a node serves its own metrics with its own labels."""
    in_service = (instance.upstream for instance in router.instances() if instance.in_service)
    return [upstream for upstream in in_service if not upstream.node]


class VisibleMetrics:
    """Metrics, filtered to the models and clients that the client may see."""

    def __init__(
        self, whole: Iterable[Metric], models: Collection[str], client: str | None = None
    ) -> None:
        self._whole = whole
        self._models = models
        self._client = client

    def collect(self) -> Iterator[Metric]:
        for family in self._whole:
            samples = family.samples
            family.samples = [sample for sample in samples if self._is_visible(sample.labels)]
            yield family

    def _is_visible(self, labels: Mapping[str, str]) -> bool:
        model, client = labels.get("model"), labels.get("client")
        if client and self._client not in {None, client}:
            return False
        return not model or model in self._models


def _queues(queues: Mapping[str, QueueStats]) -> Iterator[Metric]:
    waiting = {
        (model, priority): count
        for model, queue in queues.items()
        for priority, count in (("interactive", queue.interactive), ("batch", queue.batch))
    }
    oldest_s = {(model,): queue.oldest_wait_s for model, queue in queues.items()}
    expected_s = {(model,): queue.expected_wait_s for model, queue in queues.items()}
    yield gauge("requests_waiting", waiting)
    yield gauge("oldest_wait_seconds", oldest_s)
    yield gauge("expected_wait_seconds", expected_s)


def _kv_cache(instances: Iterable[InstanceStats]) -> Metric:
    """Return the use of KV caches: each slot has its own part, for one request."""
    slots, leased = Counter[str](), Counter[str]()
    for instance in instances:
        if instance.in_service:
            slots[instance.upstream.model] += instance.upstream.slots
            leased[instance.upstream.model] += len(instance.leases)
    ratios = {(model,): leased[model] / count for model, count in slots.items() if count}
    return gauge("kv_cache_usage_ratio", ratios)


def _instances(instances: Sequence[InstanceStats], now_s: float) -> Iterator[Metric]:
    totals = [(instance, totals_of(all_slots([instance], now_s))) for instance in instances]
    for name, value in _OF_INSTANCE.items():
        values = {_labels(instance.upstream): value(instance, total) for instance, total in totals}
        yield gauge(name, values)


def _labels(upstream: Upstream) -> tuple[str, ...]:
    return upstream.model, upstream.name
