"""An instance's time per token, by the number of sequences that it decodes at once. Pure.

A pass over eight sequences takes longer than a pass over one, and a faster instance gets more of
them. So numbers of sequences that make little difference have an average of their own, and
instances are compared only at one that both have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from proxy.upstream.timings import average

# An average of fewer forward passes says nothing; each token of a response takes one.
MIN_SAMPLES: Final = 100
# What was measured so long before the latest response says nothing either.
MEMORY_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """A running average; `samples` are forward passes, `at_s` is that of the latest."""

    ms_per_token: float
    samples: int
    at_s: float

    def after(self, newest: Measurement) -> Measurement:
        if newest.at_s - self.at_s > MEMORY_S:
            return newest
        ms_per_token = average(self.ms_per_token, newest.ms_per_token)
        return Measurement(ms_per_token, self.samples + newest.samples, newest.at_s)


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """Measurements by level: up to 2 sequences, up to 8, up to 32, and so on."""

    levels: Mapping[int, Measurement] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(one.samples for one in self.levels.values())

    @property
    def latest_s(self) -> float:
        return max((one.at_s for one in self.levels.values()), default=0.0)

    def after(self, newest: Measurement, sequences: int) -> DecodeLatency:
        """The measurements after one more response, beside which others were decoded."""
        level = (max(1, sequences) - 1).bit_length() // 2
        before = self.levels.get(level)
        now = before.after(newest) if before else newest
        return DecodeLatency({**self.levels, level: now})

    def over(self, other: DecodeLatency, since_s: float) -> float | None:
        """This latency as a multiple of another: at the level that both measured last.

        None where neither level has enough samples of both, or all are older than `since_s`.
        """
        common = [
            (min(mine.at_s, theirs.at_s), mine.ms_per_token / theirs.ms_per_token)
            for level, mine in self.levels.items()
            if (theirs := other.levels.get(level))
            and min(mine.samples, theirs.samples) >= MIN_SAMPLES
        ]
        at_s, ratio = max(common, default=(0.0, 1.0))
        return ratio if common and at_s >= since_s else None


UNMEASURED: Final = DecodeLatency()
