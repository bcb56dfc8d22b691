"""Parses llama-server's `/metrics`. Pure.

Source: Prometheus text exposition format 0.0.4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PREFIX: Final = "llamacpp:"
_META: Final = re.compile(rf"# (HELP|TYPE) ({PREFIX}\w++) (.*)")
_SAMPLE: Final = re.compile(rf"({PREFIX}\w++)(?:\{{([^}}]*)\}})? (\S+)(?: \d+)?")
_LABEL: Final = re.compile(r'\b(\w++)="([^"\\]*+)"')


@dataclass(slots=True)
class EngineMetric:
    """One metric: its samples as pairs of labels and value."""

    name: str
    help: str = ""
    type: str = "untyped"
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)


def parse_metrics(text: str) -> list[EngineMetric]:
    """The engine's own metrics; lines that are not valid are skipped."""
    metrics: dict[str, EngineMetric] = {}
    for line in text.splitlines():
        if found := _META.fullmatch(line):
            metric = metrics.setdefault(found[2], EngineMetric(found[2]))
            setattr(metric, found[1].lower(), found[3])
        elif (found := _SAMPLE.fullmatch(line)) and (value := _number(found[3])) is not None:
            metric = metrics.setdefault(found[1], EngineMetric(found[1]))
            metric.samples.append((dict(_LABEL.findall(found[2] or "")), value))
    return list(metrics.values())


def plain_values(text: str) -> dict[str, float]:
    """The values without labels, by name without `llamacpp:`."""
    return {
        metric.name.removeprefix(PREFIX): value
        for metric in parse_metrics(text)
        for labels, value in metric.samples
        if not labels
    }


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
