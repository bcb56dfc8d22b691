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

from proxy.failures import FAILURES
from proxy.line.dispatch import Dispatch
from proxy.loader import ModelCard
from proxy.record import Record, Tell
from proxy.settings import ProxySettings
from proxy.watch import families
from proxy.watch.scrape import Reading, Scrape, merged
from proxy.watch.tally import Tally

_ENDS: Final = ("requests_finished", "requests_failed", "requests_cancelled")
_TEXT: Final = "text/plain"


class Metrics:
    """Counts what it hears told, and writes the page."""

    def __init__(
        self,
        dispatch: Dispatch,
        settings: ProxySettings,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatch = dispatch
        self._told = tell
        self._clock = clock
        self._tally = Tally()
        self._scrape = Scrape(settings, clock)
        self._process = ProcessCollector(registry=None)
        self._open: set[Record] = set()

    def tell(self, name: str, /, **fields: object) -> None:
        """Count an event, and pass it on to whoever else is told."""
        self._tally.hear(name, fields)
        self._told(name, **fields)

    @contextmanager
    def counting(self, record: Record) -> Iterator[None]:
        """Count a request as under way for the length of the block."""
        self._open.add(record)
        try:
            yield
        finally:
            self._open.discard(record)

    async def page(self, accept: str, cards: Sequence[ModelCard]) -> tuple[bytes, str]:
        """Return the page and its content type.

        Args:
            accept: The client's header field of this name: plain text, or OpenMetrics.
            cards: The models that the client may know of.
        """
        admitted = (seat.upstream for seat in self._dispatch.seats() if seat.is_admitted)
        # A node's figures are its own to show, with labels of its own.
        upstreams = [upstream for upstream in admitted if not upstream.node]
        readings = await self._scrape.read(upstreams)
        encode, content_type = _encoder(accept)
        return encode(_Seen(self._collect(readings), {card.id for card in cards})), content_type

    def _collect(self, readings: Sequence[Reading]) -> Iterator[Metric]:
        yield from self._requests()
        yield from families.counted(self._tally)
        yield families.failures(FAILURES.counts)
        yield from families.spreads(self._tally)
        yield from families.lines(self._dispatch.lines())
        yield from families.seats(self._dispatch.seats(), self._clock())
        yield families.heard({reading.upstream: bool(reading.families) for reading in readings})
        yield from merged(family for reading in readings for family in reading.families)
        yield from self._process.collect()

    def _requests(self) -> Iterator[Metric]:
        upstreams = (seat.upstream for seat in self._dispatch.seats())
        in_flight = Counter({self._tally.who(one.model, one.name): 0 for one in upstreams})
        given = (record for record in self._open if record.instance)
        in_flight.update(self._tally.who(record.model, record.instance) for record in given)
        # By model alone: a second try moves a request from one instance to another.
        accepted = Counter[tuple[str, ...]]()
        for counts in (in_flight, *(self._tally.counts[end] for end in _ENDS)):
            for (model, _), count in counts.items():
                accepted[model,] += count
        yield families.requests_accepted(accepted)
        yield families.requests_in_flight(in_flight)


class _Seen:
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


def _encoder(accept: str) -> tuple[Callable[[_Seen], bytes], str]:
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return choose_encoder(_TEXT)
