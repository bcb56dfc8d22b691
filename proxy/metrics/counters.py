"""Request counters, from the events of `proxy.access_log`. Pure.

    accepted = finished + failed + cancelled + in flight
    requests for a model = accepted + rejected + waiting

A request is rejected if it ends in an error before any instance got it, and accepted otherwise;
while it is queued it is neither. `accepted` is computed from the other four, so both equations
always hold. Endpoints that no instance answers are counted only if rejected.

Names come from the settings, so they are few; those beyond a limit are counted as `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.access_log import CLIENT_GONE

OTHER: Final = "other"
_MODELS_MAX: Final = 64
_INSTANCES_MAX: Final = 256

_Key = tuple[str, ...]
# Prometheus adds a label `instance` of its own: the address that it reads.
BY_INSTANCE: Final = ("model", "model_instance")

COUNTERS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "requests_finished": (BY_INSTANCE, "Requests that an instance answered completely."),
    "requests_failed": (BY_INSTANCE, "Requests that ended in an error after an instance got them."),
    "requests_cancelled": (BY_INSTANCE, "Requests whose client disconnected before the end."),
    "requests_rejected": (("model", "code"), "Requests that no instance got, by error code."),
    "retries": (BY_INSTANCE, "Retries, by the last instance."),
    "continued_answers": (
        BY_INSTANCE,
        "Answers that an engine went on with after another had been killed, or crashed on trial.",
    ),
    "fallbacks": (("model",), "Requests for a model that another one got."),
    "upstream_failures": (BY_INSTANCE, "Responses that an instance broke off or did not begin."),
    "prompt_tokens": (BY_INSTANCE, "Prompt tokens computed."),
    "cached_tokens": (BY_INSTANCE, "Prompt tokens taken from a cache."),
    "expected_cached_tokens": (BY_INSTANCE, "Prompt tokens that routing expected in a cache."),
    "expected_tokens_found": (BY_INSTANCE, "Of the expected prompt tokens, those found there."),
    "decoded_tokens": (BY_INSTANCE, "Tokens generated."),
    "drafted_tokens": (BY_INSTANCE, "Tokens drafted."),
    "accepted_tokens": (BY_INSTANCE, "Drafted tokens that were accepted."),
}
_TOKENS: Final = tuple(name for name in COUNTERS if name.endswith("_tokens"))

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BRIEF: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0)
HISTOGRAMS: Final[Mapping[str, tuple[Sequence[float], str]]] = {
    "queue_seconds": (_SECONDS, "Time in the queue, a model load included."),
    "time_to_first_token_seconds": (_SECONDS, "Time from arrival to the first generated token."),
    "time_per_output_token_seconds": (_BRIEF, "Mean time between two tokens of one response."),
    "request_seconds": (_SECONDS, "Time from arrival to the end."),
}


class Histogram:
    """Counts of values by inclusive upper bounds, not cumulative; the last is above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RequestCounters:
    """Counts since the start, by name and label values."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[_Key]] = {name: Counter() for name in COUNTERS}
        self.histograms: dict[str, dict[_Key, Histogram]] = {name: {} for name in HISTOGRAMS}
        self._models = _Names(_MODELS_MAX)
        self._instances = _Names(_INSTANCES_MAX)

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count an event; those not listed here are ignored."""
        match event:
            case "request.finished":
                self._end(fields)
            case "request.rejected":
                labels = (self._models.of(fields["model"]), fields["code"])
                self.counts["requests_rejected"][labels] += 1
            case "upstream.failed":
                key = self.labels_of(fields["model"], fields["instance"])
                self.counts["upstream_failures"][key] += 1

    def begin(self, model: str, instance: str) -> None:
        """Count an instance from 0: Prometheus sees no increase in a counter that begins with 1."""
        key = self.labels_of(model, instance)
        for name, (labels, _) in COUNTERS.items():
            if labels is BY_INSTANCE:
                self.counts[name].setdefault(key, 0)
        for name in HISTOGRAMS:
            self._histogram(name, key)

    def labels_of(self, model: str | None, instance: str | None) -> _Key:
        return self._models.of(model), self._instances.of(instance)

    def _end(self, fields: Mapping[str, Any]) -> None:
        key = self.labels_of(fields["model"], fields["instance"])
        self.counts[_outcome(fields["status"])][key] += 1
        if fields["attempts"] > 1:
            self.counts["retries"][key] += fields["attempts"] - 1
        if continued := fields.get("continued"):
            self.counts["continued_answers"][key] += continued
        if asked := fields.get("fallback_for"):
            self.counts["fallbacks"][self._models.of(asked),] += 1
        for name in _TOKENS:
            if count := fields[name]:
                self.counts[name][key] += count
        # For each request: more than expected of one prompt does not make up for another.
        found = min(fields["expected_cached_tokens"] or 0, fields["cached_tokens"] or 0)
        self.counts["expected_tokens_found"][key] += found
        for name, ms in _times(fields).items():
            if ms is not None:
                self._histogram(name, key).add(ms / 1000)

    def _histogram(self, name: str, key: _Key) -> Histogram:
        histograms = self.histograms[name]
        if key not in histograms:
            histograms[key] = Histogram(HISTOGRAMS[name][0])
        return histograms[key]


class _Names:
    """Bounds the number of different names; further ones become `other`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str | None) -> str:
        if not name or name in self._known:
            return name or ""
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(name)
        return name


def _outcome(status: int) -> str:
    # An engine's own 4xx is a complete response.
    if status == CLIENT_GONE:
        return "requests_cancelled"
    return "requests_failed" if status >= 500 else "requests_finished"


def waited_ms(fields: Mapping[str, Any]) -> float:
    """Return how long a request waited for a slot, a model load included."""
    waited: float = fields["queued_ms"] + fields["evict_ms"] + fields["load_ms"]
    return waited


def _times(fields: Mapping[str, Any]) -> dict[str, float | None]:
    decoded = fields["decoded_tokens"] or 0
    decode_ms = fields["engine_decode_ms"] or fields["decode_ms"]  # by the proxy's clock
    between = decode_ms / (decoded - 1) if decode_ms and decoded > 1 else None
    return {
        "queue_seconds": waited_ms(fields) if fields["attempts"] else None,
        "time_to_first_token_seconds": fields["first_token_ms"],
        "time_per_output_token_seconds": between,
        "request_seconds": fields["duration_ms"],
    }
