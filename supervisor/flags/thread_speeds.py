"""Chooses thread counts by the speeds that an engine reached with them. Pure.

Threads synchronise after each operation of a graph, at a price that depends on the machine. One
sequence of SmolLM2-135M on 2 virtual cores (build 10434): 118 tokens/s with 2 threads and 70 with 1
on one host, 32 and 135 on another, both idle. A batch that holds a prompt or several sequences is
computed with `threads-batch`: on the second host, 8 sequences made 117 tokens/s with 2 and 294 with
1, while a prompt took 850 and 460.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

# The usual count is kept unless another one is faster by this.
_GAIN_MIN: Final = 1.05
COUNTS_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class ThreadSpeeds:
    """Tokens per second with one number of threads; None where it was not measured."""

    decode: float  # one sequence
    prefill: float | None = None
    together: float | None = None  # several sequences, in total


@dataclass(frozen=True, slots=True)
class ThreadMeasurement:
    """What is known of one model on this machine, by number of threads."""

    speeds: Mapping[int, ThreadSpeeds] = field(default_factory=dict)

    def untried(self, cores: int) -> int | None:
        """The next count to measure on so many cores, or None."""
        return next((count for count in counts(cores) if count not in self.speeds), None)

    def decode(self) -> Mapping[int, float]:
        return {count: one.decode for count, one in self.speeds.items()}

    def prefill(self) -> Mapping[int, float]:
        return _known((count, one.prefill) for count, one in self.speeds.items())

    def together(self) -> Mapping[int, float]:
        return _known((count, one.together) for count, one in self.speeds.items())


def counts(cores: int) -> tuple[int, ...]:
    """The counts to compare, at most COUNTS_MAX: all cores, all but one, and half of them."""
    return tuple(dict.fromkeys(max(1, count) for count in (cores, cores - 1, cores // 2)))


def fastest(speeds: Mapping[int, float], cores: int) -> int:
    """The fastest count up to `cores`; `cores` itself unless another is clearly faster."""
    usual = speeds.get(cores)
    others = {count: speed for count, speed in speeds.items() if count < cores}
    best = max(others, key=lambda count: others[count], default=cores)
    return best if usual and best != cores and others[best] >= _GAIN_MIN * usual else cores


def _known(pairs: Iterable[tuple[int, float | None]]) -> Mapping[int, float]:
    return {count: speed for count, speed in pairs if speed}
