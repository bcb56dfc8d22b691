"""The engines' own metrics, relabelled by model and instance.

Reading `/metrics` costs an engine: polls at 1 Hz or more delay its notice of clients that left. So
an engine is read only on request and at most once in two seconds, for `corral status` too. Each
read resets the engine's own averages of throughput, whoever reads; so they are computed here, from
its totals when `/metrics` was last answered.

Source: llama-server builds 10434 and 11434, measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from prometheus_client import Metric

from proxy.errors import ProxyError
from proxy.metrics.counters import BY_INSTANCE
from proxy.settings import ProxySettings
from proxy.upstream.client import fetch, get_request
from proxy.upstream.metrics_text import PREFIX, EngineMetric, parse_metrics, plain_values
from proxy.upstream.upstream import Upstream

_AGE_MIN_S: Final = 2.0
_TIMEOUT_S: Final = 1.0
_MAX_BYTES: Final = 256 * 1024
_COMPUTED: Final = ("prompt_tokens_total", "tokens_predicted_total")
# Averages since `/metrics` was last answered: of which tokens, and in which seconds.
_AVERAGES: Final = {
    "prompt_tokens_seconds": ("prompt_tokens_total", "prompt_seconds_total"),
    "predicted_tokens_seconds": ("tokens_predicted_total", "tokens_predicted_seconds_total"),
}
_MAXIMUM: Final = f"{PREFIX}n_tokens_max"  # declared as a counter, but is the largest value so far


@dataclass(frozen=True, slots=True)
class Scraped:
    """One read of one engine.

    Attributes:
        at_s: When it was last read.
        exposed_at_s: When it was last read for `/metrics`.
        families: Empty if it failed.
        values: Those without labels, by name without `llamacpp:`, of the last read that did not.
    """

    upstream: Upstream
    at_s: float
    exposed_at_s: float = float("-inf")
    families: tuple[Metric, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Passes:
    """An engine's forward passes since it started, and the tokens that it computed in them.

    It counts a pass at once, the tokens of a prompt when that is complete, and the tokens of an
    answer when that ends.
    """

    count: int
    prompt_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class _Exposed:
    """What `/metrics` was last answered with."""

    reading: Scraped
    averages: Mapping[str, float]


class Scrape:
    """Reads each engine at most once in two seconds."""

    def __init__(
        self, settings: ProxySettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._readings: dict[str, Scraped] = {}
        self._exposed: dict[str, _Exposed] = {}

    async def read(
        self, upstreams: Sequence[Upstream], age_max_s: float = _AGE_MIN_S
    ) -> list[Scraped]:
        """The latest reading of each, at most so old; all are requested concurrently.

        Readings of other instances are dropped. Takes at most a second.
        """
        return await self._read_all(upstreams, self._due(upstreams, age_max_s))

    async def _read_all(
        self, upstreams: Sequence[Upstream], due: Iterable[Upstream]
    ) -> list[Scraped]:
        names = {upstream.name for upstream in upstreams}
        for name in self._readings.keys() - names:
            del self._readings[name]
            self._exposed.pop(name, None)
        async with asyncio.TaskGroup() as group:
            for upstream in due:
                group.create_task(self._read(upstream))
        return [reading for _, reading in sorted(self._readings.items())]

    @property
    def values(self) -> dict[str, Mapping[str, float]]:
        """The latest metrics without labels that were read, by instance."""
        return {name: reading.values for name, reading in self._readings.items()}

    async def expose(self, upstreams: Sequence[Upstream]) -> list[Scraped]:
        """As `read`, but for what was read for others; with averages since the call before."""
        due = self._due(upstreams, _AGE_MIN_S, is_exposed=True)
        return [self._averaged(reading) for reading in await self._read_all(upstreams, due)]

    def _averaged(self, reading: Scraped) -> Scraped:
        name = reading.upstream.name
        before = self._exposed.get(name)
        if before is None or before.reading.upstream != reading.upstream:
            before = _Exposed(Scraped(reading.upstream, reading.at_s), {})
        if before.reading.exposed_at_s != reading.exposed_at_s:
            found = averages(before.reading.values, reading.values)
            before = self._exposed[name] = _Exposed(reading, found)
        families = tuple(_with_average(family, before.averages) for family in reading.families)
        return replace(reading, families=families)

    def _due(
        self, upstreams: Sequence[Upstream], age_max_s: float, *, is_exposed: bool = False
    ) -> Iterator[Upstream]:
        """Yield the engines to read; no other caller reads them for two seconds."""
        now_s = self._clock()
        for upstream in upstreams:
            last = self._readings.get(upstream.name)
            if last is None or last.upstream != upstream:
                last = Scraped(upstream, float("-inf"))
            elif now_s - (last.exposed_at_s if is_exposed else last.at_s) < age_max_s:
                continue
            exposed_at_s = now_s if is_exposed else last.exposed_at_s
            self._readings[upstream.name] = replace(last, at_s=now_s, exposed_at_s=exposed_at_s)
            yield upstream

    async def _read(self, upstream: Upstream) -> None:
        try:
            text = await self._fetch(upstream)
        except asyncio.CancelledError:
            self._set_unread(upstream)
            raise
        latest = self._readings.get(upstream.name)
        if latest and latest.upstream == upstream:
            values = plain_values(text) or latest.values
            families = tuple(relabelled_metrics(text, upstream))
            self._readings[upstream.name] = replace(latest, families=families, values=values)

    def _set_unread(self, upstream: Upstream) -> None:
        """Have the next caller read an engine: this one did not wait for it."""
        latest = self._readings.get(upstream.name)
        if latest and latest.upstream == upstream:
            never_s = float("-inf")
            self._readings[upstream.name] = replace(latest, at_s=never_s, exposed_at_s=never_s)

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


def averages(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens per second that an engine computed between two reads, by its own names.

    They are 0 where no request ended in between, and left out where it has no totals.
    """
    found: dict[str, float] = {}
    for name, (tokens, seconds) in _AVERAGES.items():
        if tokens in now and seconds in now:
            took_s = now[seconds] - before.get(seconds, 0.0)
            count = now[tokens] - before.get(tokens, 0.0)
            found[name] = round(count / took_s, 4) if took_s > 0 else 0.0
    return found


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


def _with_average(family: Metric, found: Mapping[str, float]) -> Metric:
    """Return a family, with the average of ours where it is the engine's."""
    value = found.get(family.name.removeprefix(PREFIX))
    if value is None:
        return family
    whole = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        whole.add_sample(sample.name, sample.labels, value)
    return whole


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
