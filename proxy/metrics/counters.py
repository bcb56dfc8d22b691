"""Counts how requests ended, from what is told at their end (`proxy.access_log`). Pure.

    accepted = finished + failed + cancelled + in flight
    asked for a model = accepted + refused + waiting

A request is refused when it ends in an error before any instance had it, and accepted otherwise;
while it waits it is neither. Accepted is not counted for itself but added up of the other four, so
both lines hold at every moment. Pages that no instance answers are not counted unless refused.

Names come from the settings, so they are few; should they change for months on end, those beyond
a limit are counted together as `other`.
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
BY_INSTANCE: Final = ("model", "instance")

COUNTERS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "requests_finished": (BY_INSTANCE, "Requests that an instance answered to the end."),
    "requests_failed": (BY_INSTANCE, "Requests that an instance had, and that ended in an error."),
    "requests_cancelled": (BY_INSTANCE, "Requests whose client left before the end."),
    "requests_rejected": (("model", "code"), "Requests that no instance got, by reason."),
    "retries": (BY_INSTANCE, "Second tries, by the instance that had the second."),
    "upstream_failures": (BY_INSTANCE, "Answers that an instance broke off or did not begin."),
    "prompt_tokens": (BY_INSTANCE, "Tokens of prompts that were computed."),
    "cached_tokens": (BY_INSTANCE, "Tokens of prompts that were taken from a cache."),
    "expected_cached_tokens": (BY_INSTANCE, "Tokens that routing expected to find in a cache."),
    "decoded_tokens": (BY_INSTANCE, "Tokens that were generated."),
    "drafted_tokens": (BY_INSTANCE, "Tokens that were guessed ahead."),
    "accepted_tokens": (BY_INSTANCE, "Tokens guessed ahead that came true."),
}
_TOKENS: Final = tuple(name for name in COUNTERS if name.endswith("_tokens"))

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BRIEF: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0)
HISTOGRAMS: Final[Mapping[str, tuple[Sequence[float], str]]] = {
    "queue_seconds": (_SECONDS, "Time in line, a load included, until an instance had it."),
    "time_to_first_token_seconds": (_SECONDS, "Time from arrival to the first generated token."),
    "time_per_output_token_seconds": (_BRIEF, "Mean time between two tokens of one answer."),
    "request_seconds": (_SECONDS, "Time from arrival to the end, by the client's measure."),
}


class Histogram:
    """How often a figure fell between which bounds.

    Attributes:
        bounds: Upper bounds, each included, ascending.
        counts: How often, one for each bound and one for what lies above them all.
        total: The sum of all figures.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, figure: float) -> None:
        """Count one figure."""
        self.counts[bisect_left(self.bounds, figure)] += 1
        self.total += figure


class RequestCounters:
    """What happened to requests since the proxy began.

    Attributes:
        counts: For each name of COUNTERS how often, by the values of its labels.
        histograms: For each name of SPREADS how the figures fell, by model and instance.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[_Key]] = {name: Counter() for name in COUNTERS}
        self.histograms: dict[str, dict[_Key, Histogram]] = {name: {} for name in HISTOGRAMS}
        self._models = _Names(_MODELS_MAX)
        self._instances = _Names(_INSTANCES_MAX)

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count an event of `proxy.access_log`; others are nothing to us."""
        match event:
            case "request.finished":
                self._end(fields)
            case "request.rejected":
                key = (self._models.of(fields["model"]), fields["code"])
                self.counts["requests_rejected"][key] += 1
            case "upstream.failed":
                self.counts["upstream_failures"][
                    self.labels_of(fields["model"], fields["instance"])
                ] += 1

    def labels_of(self, model: str | None, instance: str | None) -> _Key:
        """Return the values of the labels `model` and `instance`."""
        return self._models.of(model), self._instances.of(instance)

    def _end(self, fields: Mapping[str, Any]) -> None:
        who = self.labels_of(fields["model"], fields["instance"])
        self.counts[_outcome(fields["status"])][who] += 1
        if fields["attempts"] > 1:
            self.counts["retries"][who] += fields["attempts"] - 1
        for name in _TOKENS:
            if count := fields[name]:
                self.counts[name][who] += count
        for name, ms in _times(fields).items():
            if ms is not None:
                self._spread(name, who).add(ms / 1000)

    def _spread(self, name: str, who: _Key) -> Histogram:
        spreads = self.histograms[name]
        if who not in spreads:
            spreads[who] = Histogram(HISTOGRAMS[name][0])
        return spreads[who]


class _Names:
    """At most so many different names; the rest have one in common."""

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
    """Return the counter of an end; an engine's own refusal (4xx) is an answer like any other."""
    if status == CLIENT_GONE:
        return "requests_cancelled"
    return "requests_failed" if status >= 500 else "requests_finished"


def _times(fields: Mapping[str, Any]) -> dict[str, float | None]:
    decoded, decode_ms = fields["decoded_tokens"] or 0, fields["decode_ms"]
    between = decode_ms / (decoded - 1) if decode_ms and decoded > 1 else None
    return {
        "queue_seconds": fields["queued_ms"],
        "time_to_first_token_seconds": fields["first_token_ms"],
        "time_per_output_token_seconds": between,
        "request_seconds": fields["duration_ms"],
    }
