"""Prometheus' families of figures, made from our own counts and facts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from proxy.metrics.counters import BY_INSTANCE, COUNTERS, HISTOGRAMS, RequestCounters
from proxy.metrics.slots_endpoint import SlotTotals, all_slots, totals_of
from proxy.router.instances import InstanceStats
from proxy.router.model_queue import QueueStats
from proxy.upstream.upstream import Upstream

_PREFIX: Final = "corral_"
_Figures = dict[tuple[str, ...], float]

_SEATS: Final[Mapping[str, tuple[str, Callable[[InstanceStats, SlotTotals], float]]]] = {
    "slots": ("Slots.", lambda _, load: load.slots),
    "slots_prefill": ("Slots in which a prompt is read.", lambda _, load: load.prefill),
    "slots_decode": ("Slots in which tokens are generated.", lambda _, load: load.decode),
    "conversations": (
        "Conversations that are at home here.",
        lambda instance, _: instance.conversations,
    ),
    "prefill_tokens_per_second": (
        "Tokens of prompts computed each second, running average.",
        lambda instance, _: instance.prefill_tps,
    ),
    "decode_tokens_per_second": (
        "Tokens generated each second for one request, running average.",
        lambda instance, _: instance.decode_tps,
    ),
}


def requests_accepted(figures: Mapping[tuple[str, ...], int]) -> Metric:
    """Return how many requests were not refused, by model."""
    return _counter("requests_accepted", ("model",), "Requests that were not refused.", figures)


def requests_in_flight(figures: Mapping[tuple[str, ...], int]) -> Metric:
    """Return how many requests instances have now, by model and instance."""
    return _gauge("requests_in_flight", BY_INSTANCE, "Requests that an instance has now.", figures)


def failures(counts: Mapping[str, int]) -> Metric:
    """Return how often tasks of the daemon failed and were tried again, by task."""
    figures: _Figures = {(task,): count for task, count in counts.items()}
    return _counter("task_failures", ("task",), "Failures inside, by task.", figures)


def counted(counters: RequestCounters) -> Iterator[Metric]:
    """Yield every counter of the tally."""
    for name, (labels, text) in COUNTERS.items():
        yield _counter(name, labels, text, counters.counts[name])


def histograms(counters: RequestCounters) -> Iterator[Metric]:
    """Yield every histogram of the tally."""
    for name, (bounds, text) in HISTOGRAMS.items():
        family = HistogramMetricFamily(_PREFIX + name, text, labels=BY_INSTANCE)
        edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
        for who, spread in counters.histograms[name].items():
            sums = accumulate(spread.counts)
            family.add_metric(who, list(zip(edges, sums, strict=True)), spread.total)
        yield family


def queues(facts: Mapping[str, QueueStats]) -> Iterator[Metric]:
    """Yield who waits, by model."""
    waiting: _Figures = {
        (model, priority): count
        for model, line in facts.items()
        for priority, count in (("interactive", line.interactive), ("batch", line.batch))
    }
    oldest_s: _Figures = {(model,): line.oldest_wait_s for model, line in facts.items()}
    expected_s: _Figures = {(model,): line.expected_wait_s for model, line in facts.items()}
    yield _gauge("requests_waiting", ("model", "priority"), "Requests in line.", waiting)
    yield _gauge("oldest_wait_seconds", ("model",), "Longest wait of those in line.", oldest_s)
    yield _gauge("expected_wait_seconds", ("model",), "Wait of one that comes now.", expected_s)


def instances(facts: Sequence[InstanceStats], now_s: float) -> Iterator[Metric]:
    """Yield what each instance has and does."""
    loads = [(instance, totals_of(all_slots([instance], now_s))) for instance in facts]
    for name, (text, figure) in _SEATS.items():
        figures: _Figures = {
            _who(instance.upstream): figure(instance, load) for instance, load in loads
        }
        yield _gauge(name, BY_INSTANCE, text, figures)


def scrape_success(engines: Mapping[Upstream, bool]) -> Metric:
    """Return which engines gave their own figures."""
    figures: _Figures = {
        _who(upstream): float(was_heard) for upstream, was_heard in engines.items()
    }
    return _gauge(
        "engine_scrape_success", BY_INSTANCE, "Whether the engine gave its figures.", figures
    )


def _who(upstream: Upstream) -> tuple[str, str]:
    return upstream.model, upstream.name


def _counter(
    name: str, labels: Sequence[str], text: str, figures: Mapping[tuple[str, ...], float]
) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for key, figure in figures.items():
        family.add_metric(key, figure)
    return family


def _gauge(
    name: str, labels: Sequence[str], text: str, figures: Mapping[tuple[str, ...], float]
) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    for key, figure in figures.items():
        family.add_metric(key, figure)
    return family
