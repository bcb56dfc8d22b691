"""The page `/metrics`, for Prometheus: what we count, what is going on, what the engines say.

Nothing here runs while a request does: its end is counted once, and everything else is looked up
when somebody asks for the page.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder

from proxy.access_log import AccessRecord, Emit
from proxy.failures import FAILURES
from proxy.metrics import families
from proxy.metrics.counters import RequestCounters
from proxy.metrics.engine_metrics import Scrape, Scraped, merged
from proxy.models import ModelInfo
from proxy.router.router import Router
from proxy.settings import ProxySettings

_ENDS: Final = ("requests_finished", "requests_failed", "requests_cancelled")
_TEXT: Final = "text/plain"


class Metrics:
    """Counts what it hears told, and writes the page."""

    def __init__(
        self,
        router: Router,
        settings: ProxySettings,
        tell: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._told = tell
        self._clock = clock
        self._counters = RequestCounters()
        self._scrape = Scrape(settings, clock)
        self._process = ProcessCollector(registry=None)
        self._open: set[AccessRecord] = set()

    def emit(self, name: str, /, **fields: object) -> None:
        """Count an event, and pass it on to whoever else is told."""
        self._counters.observe(name, fields)
        self._told(name, **fields)

    @contextmanager
    def counting(self, record: AccessRecord) -> Iterator[None]:
        """Count a request as under way for the length of the block."""
        self._open.add(record)
        try:
            yield
        finally:
            self._open.discard(record)

    async def page(self, accept: str, model_infos: Sequence[ModelInfo]) -> tuple[bytes, str]:
        """Return the page and its content type.

        Args:
            accept: The client's header field of this name: plain text, or OpenMetrics.
            model_infos: The models that the client may know of.
        """
        admitted = (
            instance.upstream for instance in self._router.instances() if instance.in_service
        )
        # A node's figures are its own to show, with labels of its own.
        upstreams = [upstream for upstream in admitted if not upstream.node]
        readings = await self._scrape.read(upstreams)
        encode, content_type = _encoder(accept)
        return encode(
            VisibleMetrics(self._collect(readings), {model_info.id for model_info in model_infos})
        ), content_type

    def _collect(self, readings: Sequence[Scraped]) -> Iterator[Metric]:
        yield from self._requests()
        yield from families.counted(self._counters)
        yield families.failures(FAILURES.counts)
        yield from families.histograms(self._counters)
        yield from families.queues(self._router.queues())
        yield from families.instances(self._router.instances(), self._clock())
        yield families.scrape_success(
            {reading.upstream: bool(reading.families) for reading in readings}
        )
        yield from merged(family for reading in readings for family in reading.families)
        yield from self._process.collect()

    def _requests(self) -> Iterator[Metric]:
        upstreams = (instance.upstream for instance in self._router.instances())
        in_flight = Counter({self._counters.labels_of(one.model, one.name): 0 for one in upstreams})
        given = (record for record in self._open if record.instance)
        in_flight.update(
            self._counters.labels_of(record.model, record.instance) for record in given
        )
        # By model alone: a second try moves a request from one instance to another.
        accepted = Counter[tuple[str, ...]]()
        for counts in (in_flight, *(self._counters.counts[end] for end in _ENDS)):
            for (model, _), count in counts.items():
                accepted[model,] += count
        yield families.requests_accepted(accepted)
        yield families.requests_in_flight(in_flight)


class VisibleMetrics:
    """A page as somebody may see it: of models, only those that they may know of."""

    def __init__(self, whole: Iterable[Metric], models: Collection[str]) -> None:
        self._whole = whole
        self._models = models

    def collect(self) -> Iterator[Metric]:
        for family in self._whole:
            family.samples = [one for one in family.samples if self._shows(one.labels.get("model"))]
            yield family

    def _shows(self, model: str | None) -> bool:
        return not model or model in self._models


def _encoder(accept: str) -> tuple[Callable[[VisibleMetrics], bytes], str]:
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return choose_encoder(_TEXT)
