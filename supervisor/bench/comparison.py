"""Compares measured values of two variants: ratio, interval, and a verdict in words.

Ratios are averaged as logarithms, so that 2 × and 1/2 × weigh the same, and Student's t gives the
interval, so that three values claim no more than three values can. The interval shown is of 95 %;
a difference is claimed only where the interval of 99 % excludes 1: one benchmark makes tens of
comparisons, and at 95 % one in twenty of identical variants would come out as different.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.bench.estimate import Estimate, difference, of_clusters, of_values

_SHOWN_LEVEL: Final = 0.95
_VERDICT_LEVEL: Final = 0.99
_MIN_RATIO: Final = 1.01
_MIN_PAIRS: Final = 3
_MIN_CONVERSATIONS: Final = 5
_SOUGHT_RATIO: Final = 1.05
_MAX_REQUESTS_TO_GO: Final = 100_000

NO_DIFFERENCE: Final = "no difference seen"
TOO_FEW: Final = "too few values to compare"


@dataclass(frozen=True, slots=True)
class Words:
    """The words for a ratio above and below 1, and which of the two is better."""

    above: str
    below: str
    is_above_better: bool


RATE: Final = Words("faster", "slower", is_above_better=True)
TIME: Final = Words("longer", "shorter", is_above_better=False)
AMOUNT: Final = Words("more", "less", is_above_better=False)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the values of one variant, and the lowest and the highest of them."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variant against another.

    Attributes:
        ratio: Other over base, the geometric mean; nan without values.
        low: The lower end of the interval of 95 %.
        high: Its upper end; infinite where there are too few values for an interval.
        count: Pairs, or conversations of both sides, that could be compared.
    """

    ratio: float
    low: float
    high: float
    count: int
    is_different: bool
    verdict: str

    def is_better(self, words: Words) -> bool:
        return self.is_different and (self.ratio > 1) == words.is_above_better

    def data(self) -> dict[str, object]:
        """Return the values for JSON, which has neither nan nor infinity: they are null."""
        ends = {"ratio": self.ratio, "low": self.low, "high": self.high}
        known = {name: value if math.isfinite(value) else None for name, value in ends.items()}
        return known | {
            "count": self.count,
            "is_different": self.is_different,
            "verdict": self.verdict,
        }


def spread(values: Sequence[float]) -> Spread:
    """Summarise values of which there is at least one."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def compare(base: Sequence[float], other: Sequence[float], *, words: Words) -> Comparison:
    """Compare values pair by pair: the first of both belong to the first round, and so on.

    The values of a round that one variant did not finish, and pairs without a ratio (a value that
    is 0, negative or not finite) are left out.
    """
    logs = [math.log(b / a) for a, b in zip(base, other, strict=False) if _has_ratio(a, b)]
    if len(logs) < _MIN_PAIRS:
        return _without_interval(logs, len(logs))
    return _judged(of_values(logs), len(logs), words)


def compare_unpaired(
    base: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, words: Words
) -> Comparison:
    """Compare requests of two variants that served different conversations at the same time.

    Requests of one conversation resemble each other, so each inner sequence, a conversation,
    counts as one observation of as many requests as it has. Values without a logarithm are left
    out.
    """
    sides = [_logs(side) for side in (base, other)]
    count = sum(map(len, sides))
    if min(map(len, sides)) < _MIN_CONVERSATIONS:
        flat = [[value for logs in side for value in logs] for side in sides]
        return _without_interval(
            [statistics.fmean(flat[1]) - statistics.fmean(flat[0])] if all(flat) else [], count
        )
    return _judged(difference(*map(of_clusters, sides)), count, words)


def requests_to_go(base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> int | None:
    """Estimate how many more requests, of both sides, would show a difference of 5 %.

    None while there are too few conversations to tell; at most 100,000.
    """
    sides = [_logs(side) for side in (base, other)]
    if min(map(len, sides)) < _MIN_CONVERSATIONS:
        return None
    half_width = difference(*map(of_clusters, sides)).half_width(_VERDICT_LEVEL)
    seen = sum(len(logs) for side in sides for logs in side)
    # The width falls with the square root of the count.
    needed = seen * (half_width / math.log(_SOUGHT_RATIO)) ** 2
    return max(0, min(_MAX_REQUESTS_TO_GO, math.ceil(needed) - seen))


def interval_of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval of 95 % of the geometric mean; None for fewer than three values."""
    logs = [math.log(value) for value in values if _has_ratio(value)]
    if len(logs) < _MIN_PAIRS:
        return None
    estimate = of_values(logs)
    half = estimate.half_width(_SHOWN_LEVEL)
    return _exp(estimate.mean - half), _exp(estimate.mean + half)


def _has_ratio(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


def _logs(conversations: Sequence[Sequence[float]]) -> list[list[float]]:
    found = ([math.log(v) for v in values if _has_ratio(v)] for values in conversations)
    return [logs for logs in found if logs]


def _without_interval(logs: Sequence[float], count: int) -> Comparison:
    ratio = math.exp(statistics.fmean(logs)) if logs else math.nan
    return Comparison(ratio, 0.0, math.inf, count, is_different=False, verdict=TOO_FEW)


def _judged(estimate: Estimate, count: int, words: Words) -> Comparison:
    half = estimate.half_width(_SHOWN_LEVEL)
    ratio, low, high = (_exp(estimate.mean + offset) for offset in (0.0, -half, half))
    is_different = abs(estimate.mean) > max(
        estimate.half_width(_VERDICT_LEVEL), math.log(_MIN_RATIO)
    )
    verdict = _verdict(ratio, low, high, words) if is_different else NO_DIFFERENCE
    return Comparison(ratio, low, high, count, is_different, verdict)


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(700.0, value)))


def _verdict(ratio: float, low: float, high: float, words: Words) -> str:
    if ratio < 1:
        return _sentence(1 / ratio, 1 / high, 1 / low, words.below)
    return _sentence(ratio, low, high, words.above)


def _sentence(ratio: float, low: float, high: float, word: str) -> str:
    digits = _digits(low, high)
    return f"{ratio:.{digits}f} × {word} ({low:.{digits}f}–{high:.{digits}f})"


def _digits(low: float, high: float) -> int:
    """Return the decimals that the interval supports, and that keep its end from reading 1.0."""
    if low >= 10:
        return 0
    if low >= 1.05 and high - low >= 0.15:
        return 1
    return 2 if low >= 1.005 else 3
