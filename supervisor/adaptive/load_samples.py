"""The load of the machine, sampled, and what samples of some time say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supervisor.host.processor_load import ProcessorLoad

# Timers are not exact, and neither are the ends of spans.
_TOLERANCE: Final = 0.9
# From here on, instances that compute are taken to wait for each other's threads, not to alternate.
_PRESSURE: Final = 0.5
_BUSY: Final = 0.1


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The load of a few seconds.

    Attributes:
        load: What the machine did.
        busy: Share of the time in which the decode threads of each instance of ours computed, by
            its name.
    """

    load: ProcessorLoad
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def others_cores(self) -> float | None:
        """Cores of other programs; estimated by the time that tasks waited where unknown."""
        load = self.load
        return load.pressure if load.others_cores is None else load.others_cores


def last_samples(samples: Sequence[LoadSample], span_s: float) -> list[LoadSample]:
    """The last samples with known load that cover a span; none if there are too few."""
    if not samples:
        return []
    since_s = samples[-1].load.at_s - span_s / _TOLERANCE
    found = [one for one in samples if one.load.at_s > since_s and one.others_cores is not None]
    covered_s, count = 0.0, 0
    for one in reversed(found):
        if covered_s >= span_s * _TOLERANCE:
            break
        covered_s, count = covered_s + one.load.span_s, count + 1
    return found[len(found) - count :] if covered_s >= span_s * _TOLERANCE else []


def mean_others_cores(samples: Iterable[LoadSample]) -> float:
    known = [(one.others_cores, one.load.span_s) for one in samples]
    taken = [(cores * span_s, span_s) for cores, span_s in known if cores is not None]
    return sum(cores_s for cores_s, _ in taken) / (sum(span_s for _, span_s in taken) or 1)


def mean_sharing(samples: Iterable[LoadSample], name: str) -> float:
    """The mean number of instances that compute while this one does, at least 1."""
    own = while_computing(samples, name)
    return 1 + sum(sum(_overlaps(one, name)) for one in own) / max(1, len(own))


def while_computing(samples: Iterable[LoadSample], name: str) -> Sequence[LoadSample]:
    return [one for one in samples if one.busy.get(name, 0) >= _BUSY]


def _overlaps(sample: LoadSample, name: str) -> Iterable[float]:
    """For each other instance, the share of the time in which it wants to compute as well.

    Threads that wait for a core do not compute, so what they took is too little to go by then.
    """
    waits = (sample.load.pressure or 0) >= _PRESSURE
    for other, busy in sample.busy.items():
        if other != name and busy >= _BUSY:
            yield 1.0 if waits else min(1.0, busy)
