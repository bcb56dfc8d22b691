"""Request counters, and the engines' own metrics with labels for model and instance.

    accepted = finished + failed + cancelled + in flight
    requests for a model = accepted + rejected + waiting

A request is rejected if it ends in an error before any instance got it, and accepted otherwise;
while it is queued it is neither. `accepted` is computed from the other four, so both equations
always hold. Endpoints that no instance answers are counted only if rejected. Names come from the
settings, so they are few; names above a limit are counted as `other`.

Reading `/metrics` costs an engine: polls at 1 Hz or more delay its notice of disconnected clients.
So an engine is read only on request, and at most once in two seconds. Each read resets its
throughputs for all readers, the supervisor too: they are averages since the last read.

Labels and descriptions are in `metrics.toml`. `encoder` chooses between two text formats,
Prometheus's own and OpenMetrics. Samples have the same names in both; the family of a counter lacks
`_total` in OpenMetrics.

Source: llama-server builds 10434 and 11434, measured.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, Final, TypeVar

import attrs
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from proxy.common.toml_text import table_beside
from proxy.errors import ProxyError
from proxy.observe.record import CLIENT_GONE, Report, discard
from proxy.settings import ProxySettings
from proxy.upstream.client import fetch, get_request
from proxy.upstream.engine_state import PREFIX, parse_metrics, plain_values
from proxy.upstream.upstream import Upstream

_PLAIN: Final = "text/plain"
_OPEN: Final = "application/openmetrics-text"


Encode = Callable[[Collector], bytes]


def encoder(accept: str) -> tuple[Encode, str]:
    """Return the encoder and content type of the format that an `Accept` header names first.

    Plain text if it names neither.
    """
    kinds = (entry.partition(";")[0].strip().lower() for entry in accept.split(","))
    if next((kind for kind in kinds if kind in {_PLAIN, _OPEN}), _PLAIN) == _OPEN:
        # By default prometheus_client writes `:` as `_`, but only in sample names.
        encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        return encode, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest, CONTENT_TYPE_PLAIN_0_0_4


OTHER: Final = "other"
_MODELS_MAX: Final = 64
_INSTANCES_MAX: Final = 256

_Key = tuple[str, ...]
# Not `instance`: Prometheus adds a label of that name, the address that it reads.
BY_INSTANCE: Final = ("model", "model_instance")

_COUNTER_NAMES: Final = """
    requests_finished requests_failed requests_cancelled requests_rejected retries
    continued_answers yields fallbacks prompts_changed broken_tool_calls upstream_failures
    prompt_tokens
    cached_tokens
    expected_cached_tokens expected_tokens_found decoded_tokens drafted_tokens accepted_tokens
"""
COUNTERS: Final = tuple(_COUNTER_NAMES.split())
_TOKENS: Final = tuple(name for name in COUNTERS if name.endswith("_tokens"))

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BRIEF: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0)
HISTOGRAMS: Final[Mapping[str, Sequence[float]]] = {
    "queue_seconds": _SECONDS,
    "paused_seconds": _SECONDS,
    "time_to_first_token_seconds": _SECONDS,
    "time_per_output_token_seconds": _BRIEF,
    "request_seconds": _SECONDS,
}


@cache
def families() -> Mapping[str, tuple[Sequence[str], str]]:
    """Return the labels and the description of each of our metrics."""
    tables = table_beside(__file__)
    return {
        name: (tuple(labels.split()), text)
        for labels, texts in tables.items()
        for name, text in texts.items()
    }


class Histogram:
    """Counts of values by inclusive upper bounds, not cumulative; the last count has no bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


# The values of the labels.
Key = TypeVar("Key", bound=tuple[str, ...])


def counter(name: str, values: Mapping[Key, float]) -> Metric:
    return _metric(CounterMetricFamily, name, values)


def gauge(name: str, values: Mapping[Key, float]) -> Metric:
    return _metric(GaugeMetricFamily, name, values)


def _metric(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, values: Mapping[Key, float]
) -> Metric:
    labels, text = families()[name]
    family = kind(f"corral_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(name: str, bounds: Sequence[float], histograms: Mapping[Key, Histogram]) -> Metric:
    labels, text = families()[name]
    family = HistogramMetricFamily(f"corral_{name}", text, labels=labels)
    edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
    for key, found in histograms.items():
        sums = accumulate(found.counts)
        family.add_metric(key, list(zip(edges, sums, strict=True)), found.total)
    return family


class _Row(Counter[str]):
    """The counts of one instance by name, and its histograms; those without a value are missing."""

    def __init__(self) -> None:
        super().__init__()
        self.histograms = _Histograms()

    def note_times(self, fields: Mapping[str, Any]) -> None:
        histograms = self.histograms
        if fields["attempts"]:
            histograms["queue_seconds"].add(waited_ms(fields) / 1000)
        if (first_token_ms := fields["first_token_ms"]) is not None:
            histograms["time_to_first_token_seconds"].add(first_token_ms / 1000)
        decode_ms = fields["engine_decode_ms"] or fields["decode_ms"]  # by the proxy's clock
        if decode_ms and (decoded := fields["decoded_tokens"] or 0) > 1:
            histograms["time_per_output_token_seconds"].add(decode_ms / (decoded - 1) / 1000)
        if yields := fields.get("yields"):
            self["yields"] += yields
            histograms["paused_seconds"].add(fields["paused_ms"] / 1000)
        histograms["request_seconds"].add(fields["duration_ms"] / 1000)


class _Histograms(dict[str, Histogram]):
    """The histograms of `HISTOGRAMS`, each made when it gets its first value."""

    def __missing__(self, name: str) -> Histogram:
        return self.setdefault(name, Histogram(HISTOGRAMS[name]))


class RequestCounters:
    """Counts since the start, by name and label values."""

    def __init__(self, pass_on: Report = discard) -> None:
        self._pass_on = pass_on
        self._rows: dict[_Key, _Row] = {}
        # Counters with other labels.
        names = ("requests_rejected", "fallbacks", "prompts_changed", "broken_tool_calls")
        self._others = {name: Counter[_Key]() for name in names}
        self._models = _Names(_MODELS_MAX)
        self._instances = _Names(_INSTANCES_MAX)

    @property
    def counts(self) -> Mapping[str, Counter[_Key]]:
        found = {name: Counter[_Key]() for name in COUNTERS} | self._others
        for key, row in self._rows.items():
            for name, count in row.items():
                found[name][key] = count
        return found

    @property
    def histograms(self) -> Mapping[str, Mapping[_Key, Histogram]]:
        return {
            name: {key: row.histograms[name] for key, row in rows if name in row.histograms}
            for rows in [self._rows.items()]
            for name in HISTOGRAMS
        }

    def report(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count an event, unless it is unknown, and pass it on."""
        if event == "request.finished":
            self._end(fields)
        elif event == "request.rejected":
            labels = (self._models[fields["model"]], fields["code"])
            self._others["requests_rejected"][labels] += 1
        elif event == "upstream.failed":
            self._row(fields["model"], fields["instance"])["upstream_failures"] += 1
        self._pass_on(event, fields)

    def begin(self, model: str, instance: str) -> None:
        """Start an instance's counters at 0: Prometheus ignores an increase to a first value."""
        row = self._row(model, instance)
        for name in COUNTERS:
            if families()[name][0] == BY_INSTANCE:
                row.setdefault(name, 0)
        for name, bounds in HISTOGRAMS.items():
            row.histograms.setdefault(name, Histogram(bounds))

    def labels_of(self, model: str | None, instance: str | None) -> _Key:
        return self._models[model], self._instances[instance]

    def _row(self, model: str | None, instance: str | None) -> _Row:
        row = self._rows.get(key := (self._models[model], self._instances[instance]))
        return self._rows.setdefault(key, _Row()) if row is None else row

    def _end(self, fields: Mapping[str, Any]) -> None:
        row, status = self._row(fields["model"], fields["instance"]), fields["status"]
        # A 4xx of the engine is a complete response.
        outcome = "requests_failed" if status >= 500 else "requests_finished"
        row["requests_cancelled" if status == CLIENT_GONE else outcome] += 1
        if (attempts := fields["attempts"]) > 1:
            row["retries"] += attempts - 1
        if continued := fields.get("continued"):
            row["continued_answers"] += continued
        if asked := fields.get("fallback_for"):
            self._others["fallbacks"][self._models[asked],] += 1
        if fields.get("rules") or fields.get("tool_calls"):
            self._note_changes(fields)
        for name in _TOKENS:
            if count := fields[name]:
                row[name] += count
        # Per request, so that a surplus of one prompt does not offset another's miss.
        if (cached := fields["cached_tokens"]) and (expected := fields["expected_cached_tokens"]):
            row["expected_tokens_found"] += min(expected, cached)
        row.note_times(fields)

    def _note_changes(self, fields: Mapping[str, Any]) -> None:
        """Count the rules that changed a prompt, and the broken calls of its answer."""
        model = self._models[fields["model"]]
        for rule in (fields.get("rules") or "").split():
            self._others["prompts_changed"][model, rule] += 1
        for result, count in (fields.get("tool_calls") or {}).items():
            self._others["broken_tool_calls"][model, result] += count


def waited_ms(fields: Mapping[str, Any]) -> float:
    waited: float = fields["queued_ms"] + fields["evict_ms"] + fields["load_ms"]
    return waited


class _Names(dict[str | None, str]):
    """Has each name itself, up to `most` of them; further names become `other`."""

    def __init__(self, most: int) -> None:
        super().__init__({None: "", "": ""})
        self._most = most + len(self)

    def __missing__(self, name: str | None) -> str:
        if name is None or len(self) >= self._most:
            return OTHER
        return self.setdefault(name, name)


_AGE_MIN_S: Final = 2.0
_MAX_BYTES: Final = 256 * 1024
_COMPUTED: Final = ("prompt_tokens_total", "tokens_predicted_total")
# Averages since the last read of `/metrics`, with the counters of their tokens and seconds.
_AVERAGES: Final = {
    "prompt_tokens_seconds": ("prompt_tokens_total", "prompt_seconds_total"),
    "predicted_tokens_seconds": ("tokens_predicted_total", "tokens_predicted_seconds_total"),
}
_MAXIMUM: Final = f"{PREFIX}n_tokens_max"  # declared as a counter, but is a maximum


@dataclass(frozen=True, slots=True)
class Scraped:
    """One read of one engine."""

    upstream: Upstream
    at_s: float
    exposed_at_s: float = float("-inf")  # Time of the last read for `/metrics`.
    families: tuple[Metric, ...] = ()  # Empty if the read failed.
    # Unlabelled metrics of the last successful read, by name without `llamacpp:`.
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Passes:
    """An engine's forward passes since its start, and the tokens computed in them.

    The engine counts a pass at once, prompt tokens when the prompt is complete, and decoded tokens
    when the answer ends.
    """

    count: int
    prompt_tokens: int
    decode_tokens: int


@attrs.define(eq=False)
class Scrape:
    """Reads each engine at most once in two seconds; it has `timeout_s` to answer."""

    _settings: ProxySettings
    _clock: Callable[[], float] = time.monotonic
    _timeout_s: float = 1.0
    _readings: dict[str, Scraped] = attrs.field(factory=dict, init=False)
    # The last reading that `/metrics` exposed, and its averages.
    _exposed: dict[str, tuple[Scraped, Mapping[str, float]]] = attrs.field(factory=dict, init=False)

    async def read(
        self, upstreams: Sequence[Upstream], age_max_s: float = _AGE_MIN_S
    ) -> list[Scraped]:
        """Return the latest reading of each engine, at most `age_max_s` old; reads are concurrent.

        Drops the readings of other instances. Takes at most a second.
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
        return {name: reading.values for name, reading in self._readings.items()}

    async def expose(self, upstreams: Sequence[Upstream]) -> list[Scraped]:
        """Return readings for `/metrics`, with averages since the previous call."""
        due = self._due(upstreams, _AGE_MIN_S, is_exposed=True)
        return [self._averaged(reading) for reading in await self._read_all(upstreams, due)]

    def _averaged(self, reading: Scraped) -> Scraped:
        name = reading.upstream.name
        before, found = self._exposed.get(name, (None, {}))
        if before is None or before.upstream != reading.upstream:
            before, found = Scraped(reading.upstream, reading.at_s), {}
        if before.exposed_at_s != reading.exposed_at_s:
            found = averages(before.values, reading.values)
            self._exposed[name] = (reading, found)
        families = tuple(_with_average(family, found) for family in reading.families)
        return replace(reading, families=families)

    def _due(
        self, upstreams: Sequence[Upstream], age_max_s: float, *, is_exposed: bool = False
    ) -> Iterator[Upstream]:
        """Yield the engines to read, and reserve them for two seconds."""
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
            # This caller did not wait for the engine, so the next caller must read it.
            latest = self._readings.get(upstream.name)
            if latest and latest.upstream == upstream:
                never_s = float("-inf")
                self._readings[upstream.name] = replace(latest, at_s=never_s, exposed_at_s=never_s)
            raise
        latest = self._readings.get(upstream.name)
        if latest and latest.upstream == upstream:
            values = plain_values(text) or latest.values
            families = tuple(relabelled_metrics(text, upstream))
            self._readings[upstream.name] = replace(latest, families=families, values=values)

    async def _fetch(self, upstream: Upstream) -> str:
        request = get_request("/metrics")
        try:
            response = await fetch(upstream, request, self._settings, self._timeout_s, _MAX_BYTES)
        except ProxyError:
            return ""
        return response.body.decode("utf-8", "replace") if response.status == 200 else ""


def passes_of(scraped: Scraped) -> Passes | None:
    """Return an engine's forward passes, None if it has counted none."""
    values = {
        sample.name.removeprefix(PREFIX): sample.value
        for family in scraped.families
        for sample in family.samples
    }
    count = int(values.get("n_decode_total", 0))
    prompt, decode = (int(values.get(name, 0)) for name in _COMPUTED)
    return Passes(count, prompt, decode) if count else None


def averages(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's tokens per second between two reads, by its own metric names.

    A value is 0 if no request ended in between, and missing if the engine has no totals.
    """
    found: dict[str, float] = {}
    for name, (tokens, seconds) in _AVERAGES.items():
        if tokens in now and seconds in now:
            took_s = now[seconds] - before.get(seconds, 0.0)
            count = now[tokens] - before.get(tokens, 0.0)
            found[name] = round(count / took_s, 4) if took_s > 0 else 0.0
    return found


def relabelled_metrics(text: str, upstream: Upstream) -> Iterator[Metric]:
    """Yield an engine's counters and gauges with the labels of the instance."""
    labels = dict(zip(BY_INSTANCE, (upstream.model, upstream.name), strict=True))
    for metric in parse_metrics(text):
        is_maximum = metric.name == _MAXIMUM
        if metric.type in {"counter", "gauge"}:
            kind = "gauge" if is_maximum else metric.type
            family = Metric(metric.name, metric.documentation, kind)
            for sample in metric.samples:
                name = metric.name if is_maximum else sample.name
                family.add_sample(name, {**sample.labels, **labels}, sample.value)
            yield family


def _with_average(family: Metric, found: Mapping[str, float]) -> Metric:
    value = found.get(family.name.removeprefix(PREFIX))
    if value is None:
        return family
    whole = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        whole.add_sample(sample.name, sample.labels, value)
    return whole


def merge_families(families: Iterable[Metric]) -> list[Metric]:
    """Merge families of the same name, because the text format allows each name only once."""
    by_name: dict[str, Metric] = {}
    for family in families:
        whole = by_name.setdefault(
            family.name, Metric(family.name, family.documentation, family.type)
        )
        whole.samples.extend(family.samples)
    return list(by_name.values())
