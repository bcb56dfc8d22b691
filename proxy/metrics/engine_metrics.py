"""The engines' own metrics, relabelled by model and instance.

Reading `/metrics` costs an engine: polls at 1 Hz or more delay its notice of clients that left. So
an engine is read only on request and at most once in two seconds. Each read resets its throughputs
for all readers, the supervisor too: they are averages since the last read.

Source: llama-server builds 10434 and 11434, measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import Metric

from proxy.errors import ProxyError
from proxy.metrics.counters import BY_INSTANCE
from proxy.settings import ProxySettings
from proxy.upstream.client import fetch, get_request
from proxy.upstream.metrics_text import PREFIX, EngineMetric, parse_metrics
from proxy.upstream.upstream import Upstream

_AGE_MIN_S: Final = 2.0
_TIMEOUT_S: Final = 1.0
_MAX_BYTES: Final = 256 * 1024
_COMPUTED: Final = ("prompt_tokens_total", "tokens_predicted_total")
_MAXIMUM: Final = f"{PREFIX}n_tokens_max"  # declared as a counter, but is the largest value so far


@dataclass(frozen=True, slots=True)
class Scraped:
    """One read of one engine; without families if it failed."""

    upstream: Upstream
    at_s: float
    families: tuple[Metric, ...] = ()


@dataclass(frozen=True, slots=True)
class Passes:
    """An engine's forward passes since it started, and the tokens that it computed in them.

    It counts a pass at once, the tokens of a prompt when that is complete, and the tokens of an
    answer when that ends.
    """

    count: int
    prompt_tokens: int
    decode_tokens: int


class Scrape:
    """Reads each engine at most once in two seconds."""

    def __init__(
        self, settings: ProxySettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._readings: dict[str, Scraped] = {}

    async def read(
        self, upstreams: Sequence[Upstream], age_max_s: float = _AGE_MIN_S
    ) -> list[Scraped]:
        """The latest reading of each, at most so old; all are requested concurrently.

        Readings of other instances are dropped. Takes at most a second.
        """
        names = {upstream.name for upstream in upstreams}
        for name in self._readings.keys() - names:
            del self._readings[name]
        async with asyncio.TaskGroup() as group:
            for upstream in self._due(upstreams, age_max_s):
                group.create_task(self._read(upstream))
        return [reading for _, reading in sorted(self._readings.items())]

    def _due(self, upstreams: Sequence[Upstream], age_max_s: float) -> Iterator[Upstream]:
        """Yield the engines to read; no other caller reads them for two seconds."""
        now_s = self._clock()
        for upstream in upstreams:
            last = self._readings.get(upstream.name)
            is_same = last is not None and last.upstream == upstream
            if last and is_same and now_s - last.at_s < age_max_s:
                continue
            families = last.families if last and is_same else ()
            self._readings[upstream.name] = Scraped(upstream, now_s, families)
            yield upstream

    async def _read(self, upstream: Upstream) -> None:
        text = await self._fetch(upstream)
        latest = self._readings.get(upstream.name)
        if latest and latest.upstream == upstream:
            families = tuple(relabelled_metrics(text, upstream))
            self._readings[upstream.name] = Scraped(upstream, latest.at_s, families)

    async def _fetch(self, upstream: Upstream) -> str:
        request = get_request("/metrics")
        try:
            response = await fetch(upstream, request, self._settings, _TIMEOUT_S, _MAX_BYTES)
        except ProxyError:
            return ""
        return response.body.decode("utf-8", "replace") if response.status == 200 else ""


def passes_of(scraped: Scraped) -> Passes | None:
    """Return None if the engine has counted no pass."""
    values = {
        sample.name.removeprefix(PREFIX): sample.value
        for family in scraped.families
        for sample in family.samples
    }
    count = int(values.get("n_decode_total", 0))
    prompt, decode = (int(values.get(name, 0)) for name in _COMPUTED)
    return Passes(count, prompt, decode) if count else None


def relabelled_metrics(text: str, upstream: Upstream) -> Iterator[Metric]:
    """Yield the counters and gauges, with the labels of the instance."""
    labels = dict(zip(BY_INSTANCE, (upstream.model, upstream.name), strict=True))
    for metric in parse_metrics(text):
        if metric.name == _MAXIMUM:
            metric.type = "gauge"
        if metric.type == "gauge":
            yield _family(metric, metric.name, metric.name, labels)
        elif metric.type == "counter":
            # The encoder adds `_total` to the name of the family, not to those of its samples.
            name = metric.name.removesuffix("_total")
            yield _family(metric, name, f"{name}_total", labels)


def _family(metric: EngineMetric, name: str, sample: str, labels: dict[str, str]) -> Metric:
    family = Metric(name, metric.help, metric.type)
    for own, value in metric.samples:
        family.add_sample(sample, {**own, **labels}, value)
    return family


def merged(families: Iterable[Metric]) -> list[Metric]:
    """One family for each name: the text format allows each name only once."""
    by_name: dict[str, Metric] = {}
    for family in families:
        whole = by_name.setdefault(
            family.name, Metric(family.name, family.documentation, family.type)
        )
        whole.samples.extend(family.samples)
    return list(by_name.values())
