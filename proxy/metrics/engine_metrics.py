"""The engines' own figures, read seldom and passed on under the names of model and instance.

Reading an engine's `/metrics` costs it: polls at 1 Hz or more delay its notice of clients that
left, and each one starts its averages anew for every other reader. So an engine is read at most
once in two seconds, only when somebody asks us, and what is an average is not passed on.

Source: llama-server builds 10434 and 11434, measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from proxy.errors import ProxyError
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, send
from proxy.upstream.upstream import Upstream

_AGE_MIN_S: Final = 2.0
_TIMEOUT_S: Final = 1.0
_PAGE_MAX_BYTES: Final = 256 * 1024
_NOW: Final = frozenset({"llamacpp:requests_processing", "llamacpp:requests_deferred"})
_NO_TOTAL: Final = "llamacpp:n_tokens_max"  # the largest so far, though it calls itself a counter
_LETTER: Final = UpstreamRequest("GET", "/metrics", "", CIMultiDict(), b"")


@dataclass(frozen=True, slots=True)
class Scraped:
    """What one engine said of itself.

    Attributes:
        upstream: The engine's instance.
        at_s: Monotonic time at which it was asked.
        families: Its figures; empty where it gave none.
    """

    upstream: Upstream
    at_s: float
    families: tuple[Metric, ...] = ()


class Scrape:
    """Reads engines, each at most once in two seconds."""

    def __init__(
        self, settings: ProxySettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._readings: dict[str, Scraped] = {}

    async def read(self, upstreams: Sequence[Upstream]) -> list[Scraped]:
        """Return the latest reading of each, at most two seconds old, all asked at once.

        Instances that are not among them are forgotten. An engine that does not answer within a
        second, or not with figures, has an empty reading.
        """
        names = {upstream.name for upstream in upstreams}
        for name in self._readings.keys() - names:
            del self._readings[name]
        async with asyncio.TaskGroup() as group:
            for upstream in self._due(upstreams):
                group.create_task(self._ask(upstream))
        return [reading for _, reading in sorted(self._readings.items())]

    def _due(self, upstreams: Sequence[Upstream]) -> Iterator[Upstream]:
        """Yield whom to ask; from now on nobody else asks them for two seconds."""
        now_s = self._clock()
        for upstream in upstreams:
            last = self._readings.get(upstream.name)
            if last and last.upstream == upstream and now_s - last.at_s < _AGE_MIN_S:
                continue
            families = last.families if last and last.upstream == upstream else ()
            self._readings[upstream.name] = Scraped(upstream, now_s, families)
            yield upstream

    async def _ask(self, upstream: Upstream) -> None:
        text = await _fetch(upstream, self._settings)
        asked = self._readings.get(upstream.name)
        if asked and asked.upstream == upstream:
            families = tuple(relabelled_metrics(text, upstream))
            self._readings[upstream.name] = Scraped(upstream, asked.at_s, families)


async def _fetch(upstream: Upstream, settings: ProxySettings) -> str:
    """Return an engine's page of figures, empty where it gives none."""
    page = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S), send(upstream, _LETTER, settings) as reply:
            while len(page) < _PAGE_MAX_BYTES and (chunk := await reply.read()):
                page += chunk
    except (ProxyError, TimeoutError):
        return ""
    return page.decode("utf-8", "replace") if reply.status == 200 else ""


def relabelled_metrics(text: str, upstream: Upstream) -> Iterator[Metric]:
    """Yield the figures of a page that mean the same to every reader, with their origin.

    Args:
        text: The page in the text format of Prometheus; what cannot be read is left out.
        upstream: The instance it comes from: the labels `model` and `instance`.
    """
    origin = {"model": upstream.model, "instance": upstream.name}
    try:
        for family in text_string_to_metric_families(text):
            is_total = family.type == "counter" and family.name != _NO_TOTAL
            if is_total or family.name in _NOW:
                passed = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    passed.add_sample(sample.name, {**sample.labels, **origin}, sample.value)
                yield passed
    except ValueError:
        return


def merged(families: Iterable[Metric]) -> list[Metric]:
    """Return one family for each name, with the samples of all; a page may name each only once."""
    by_name: dict[str, Metric] = {}
    for family in families:
        whole = by_name.setdefault(
            family.name, Metric(family.name, family.documentation, family.type)
        )
        whole.samples.extend(family.samples)
    return list(by_name.values())
