"""Compares the figures of a bench, judges them, and shows them as a table in a terminal.

Ratios are averaged as logarithms, so that 2 × and 1/2 × weigh the same. Student's t gives the
interval, so that three values claim no more than three values can. The table shows the 95 %
interval, but claims a difference only if the 99 % interval excludes 1: a benchmark makes tens of
comparisons, and at 95 % one in twenty of identical variants would come out as different.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import zip_longest
from textwrap import wrap
from typing import Final, Literal

from supervisor.output import colored, one_line

_BISECTIONS: Final = 80
_HIGHEST: Final = 1e6


@functools.cache
def t_quantile(level: float, degrees: int) -> float:
    """Return the t with P(|T| ≤ t) = `level`, for at least 1 degree of freedom."""
    low, high = 0.0, _HIGHEST
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _probability_within(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return high


def _probability_within(t: float, degrees: int) -> float:
    """Return P(|T| ≤ t). Source: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2
    cosine, term, total = math.cos(angle), 1.0, 0.0
    for k in range(1, (degrees - is_odd) // 2 + 1):
        total += term
        term *= cosine**2 * (2 * k - 1 + is_odd) / (2 * k + is_odd)
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * cosine * total)
    return math.sin(angle) * total


# Beyond these degrees of freedom the quantiles are within 1 % of the normal distribution's.
_MAX_DEGREES: Final = 200


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error and that error's degrees of freedom."""

    mean: float
    error: float
    degrees: int

    def half_width(self, level: float) -> float:
        return t_quantile(level, self.degrees) * self.error


def of_values(values: Sequence[float]) -> Estimate:
    """Estimate the mean of at least two independent values."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(statistics.fmean(values), error, len(values) - 1)


def of_clusters(clusters: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean over all values with its cluster-robust error.

    The degrees of freedom come from the effective number of clusters, which is lower if a few
    clusters hold most values.
    Source: Cameron and Miller, A Practitioner's Guide to Cluster-Robust Inference, 2015.
    """
    sizes = [len(cluster) for cluster in clusters]
    total, count = sum(sizes), len(sizes)
    mean = math.fsum(value for cluster in clusters for value in cluster) / total
    squares = math.fsum((math.fsum(cluster) - mean * len(cluster)) ** 2 for cluster in clusters)
    error = math.sqrt(squares * count / (count - 1)) / total
    effective = total**2 / sum(size**2 for size in sizes)
    return Estimate(mean, error, max(1, int(effective) - 1))


def difference(base: Estimate, other: Estimate) -> Estimate:
    """Subtract two independent estimates. Source: Welch, 1947, for the degrees of freedom."""
    variances = (base.error**2, other.error**2)
    parts = variances[0] ** 2 / base.degrees + variances[1] ** 2 / other.degrees
    degrees = sum(variances) ** 2 / parts if parts else base.degrees + other.degrees
    return Estimate(
        other.mean - base.mean, math.sqrt(sum(variances)), max(1, min(_MAX_DEGREES, int(degrees)))
    )


_SHOWN_LEVEL: Final = 0.95
_VERDICT_LEVEL: Final = 0.99
_MIN_RATIO: Final = 1.01
_MIN_PAIRS: Final = 3
_MIN_CONVERSATIONS: Final = 5
_SOUGHT_RATIO: Final = 1.05
_MAX_REQUESTS_TO_GO: Final = 100_000

NO_DIFFERENCE: Final = "no difference seen"
TOO_FEW: Final = "too few values to compare"
ONE_ROUND: Final = "one round: nothing can be compared"


@dataclass(frozen=True, slots=True)
class Words:
    """The words for a ratio above and below 1; `is_above_better` says which side is better."""

    above: str
    below: str
    is_above_better: bool


RATE: Final = Words("faster", "slower", is_above_better=True)
TIME: Final = Words("longer", "shorter", is_above_better=False)
AMOUNT: Final = Words("more", "less", is_above_better=False)


# Median, lowest and highest value of one variant.
Spread = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variant against another, by the geometric mean of the ratios other over base."""

    ratio: float  # nan without values
    low: float  # to `high`: the 95 % interval
    high: float  # infinite if there are too few values for an interval
    count: int  # pairs, or conversations of both sides
    is_different: bool
    verdict: str

    def is_better(self, words: Words) -> bool:
        return self.is_different and (self.ratio > 1) == words.is_above_better

    def data(self) -> dict[str, object]:
        """Return the values for JSON; nan and infinity become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def spread(values: Sequence[float]) -> Spread:
    return statistics.median(values), min(values), max(values)


def compare(base: Sequence[float], other: Sequence[float], *, words: Words) -> Comparison:
    """Compare values pair by pair: the first values of both belong to the first round, and so on.

    Skips pairs without a ratio (a value is 0, negative or not finite) and rounds that one variant
    did not finish.
    """
    logs = [math.log(b / a) for a, b in zip(base, other, strict=False) if _has_ratio(a, b)]
    if len(logs) < _MIN_PAIRS:
        return _without_interval(logs, len(logs))
    return _judge(of_values(logs), len(logs), words)


def compare_unpaired(
    base: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, words: Words
) -> Comparison:
    """Compare requests of two variants that served different conversations at the same time.

    Requests of one conversation resemble each other, so each inner sequence, a conversation,
    counts as one observation, weighted by its requests. Values without a logarithm are left out.
    """
    sides = [_logs(side) for side in (base, other)]
    count = sum(map(len, sides))
    if min(map(len, sides)) < _MIN_CONVERSATIONS:
        flat = [[value for logs in side for value in logs] for side in sides]
        return _without_interval(
            [statistics.fmean(flat[1]) - statistics.fmean(flat[0])] if all(flat) else [], count
        )
    return _judge(difference(*map(of_clusters, sides)), count, words)


def requests_to_go(base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> int | None:
    """Estimate how many more requests would show a 5 % difference, at most 100,000; or None."""
    sides = [_logs(side) for side in (base, other)]
    if min(map(len, sides)) < _MIN_CONVERSATIONS:
        return None
    half_width = difference(*map(of_clusters, sides)).half_width(_VERDICT_LEVEL)
    seen = sum(len(logs) for side in sides for logs in side)
    # The width falls with the square root of the count.
    needed = seen * (half_width / math.log(_SOUGHT_RATIO)) ** 2
    return max(0, min(_MAX_REQUESTS_TO_GO, math.ceil(needed) - seen))


def interval_of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the geometric mean, or None for fewer than three values."""
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


def _judge(estimate: Estimate, count: int, words: Words) -> Comparison:
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
    word = words.above
    if ratio < 1:
        ratio, low, high, word = 1 / ratio, 1 / high, 1 / low, words.below
    # As many decimals as the interval supports, and enough that its end does not read 1.0.
    if low >= 10:
        digits = 0
    elif low >= 1.05 and high - low >= 0.15:
        digits = 1
    else:
        digits = 2 if low >= 1.005 else 3
    return f"{ratio:.{digits}f} × {word} ({low:.{digits}f}–{high:.{digits}f})"


Unit = Literal["s", "ms", "tokens/s", "tokens", "bytes", "J"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `name` is `WORKLOAD.what`, or `what` alone for a figure of the whole round."""

    name: str
    title: str
    unit: Unit

    @property
    def workload(self) -> str | None:
        """The workload, or None for a figure of the whole round."""
        before, separator, _ = self.name.partition(".")
        return before if separator else None

    @property
    def is_higher_better(self) -> bool:
        return self.unit == "tokens/s"


READY: Final = Figure("ready_s", "time to ready", "s")
PEAK_MEMORY: Final = Figure("peak_memory", "peak memory", "bytes")
ENERGY: Final = Figure("energy", "energy per 1000 tokens", "J")
ROUND_FIGURES: Final = (READY, PEAK_MEMORY, ENERGY)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the interpolated value below which `share` of at least one value lies."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def median_rate(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else None


# For each unit the units to show it in, the largest first: name, smallest value to use it for, and
# its size in the raw unit.
_SCALES: Final[Mapping[Unit, Sequence[tuple[str, float, float]]]] = {
    "s": (("s", 1, 1), ("ms", 0, 1e-3)),
    "ms": (("s", 10_000, 1000), ("ms", 0, 1)),
    "bytes": (("GiB", 2**30, 2**30), ("MiB", 2**20, 2**20), ("KiB", 2**10, 2**10), ("B", 0, 1)),
    "J": (("kJ", 10_000, 1000), ("J", 0, 1)),
}


def scale_for(unit: Unit, values: Sequence[float]) -> tuple[str, float]:
    """Choose the unit to show and its size by the largest value: values of a figure share it."""
    largest = max(map(abs, values), default=0.0)
    for name, start, factor in _SCALES.get(unit, ()):
        if largest >= start:
            return name, factor
    return unit, 1


@dataclass(slots=True)
class Variant:
    """The measurements of one way to run the model."""

    name: str
    profile: str | None  # None for the engine's own defaults
    argv: tuple[str, ...]  # the command line, without the listening address
    # The known values by figure name, in each round that began; of all variants, the same index is
    # the same round.
    rounds: list[dict[str, float]] = field(default_factory=list)
    failure: str | None = None  # why it was given up, with the fix; None if it was not

    def values(self, figure: str) -> tuple[float, ...]:
        """The figure's values from all rounds that have it."""
        return tuple(values[figure] for values in self.rounds if figure in values)


@dataclass(frozen=True, slots=True)
class BenchMachine:
    """The machine in words that identify no person."""

    processor: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    devices: tuple[str, ...]
    system: str


@dataclass(frozen=True, slots=True)
class BenchResult:
    model: str
    model_file: str  # file name of the GGUF, without its directory
    engine: str  # the build, as it names itself
    machine: BenchMachine
    began_at: datetime
    duration_s: float
    seed: int
    workloads: tuple[str, ...]  # in the order in which each round runs them
    rounds_planned: int | None  # None if the time decided
    is_interrupted: bool
    figures: tuple[Figure, ...]  # those with a value in any variant, in the order to show them
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()  # sentences for the reader

    @property
    def rounds(self) -> int:
        return max((len(variant.rounds) for variant in self.variants), default=0)


_WORDS: Final[Mapping[Unit, Words]] = {"tokens/s": RATE, "s": TIME, "ms": TIME}


@dataclass(frozen=True, slots=True)
class VariantFinding:
    name: str
    values: tuple[float, ...]  # one per round, nan if the round has none
    spread: Spread | None  # None without any value
    # 95 % interval of the geometric mean; None if there are too few values.
    interval: tuple[float, float] | None
    # Against the first variant, round by round; None for the first variant and without values.
    comparison: Comparison | None

    @property
    def known_values(self) -> tuple[float, ...]:
        return tuple(value for value in self.values if not math.isnan(value))

    @property
    def verdict(self) -> str:
        """The comparison in words; empty for the first variant, and after a single round."""
        return self.comparison.verdict if self.comparison and len(self.values) > 1 else ""


@dataclass(frozen=True, slots=True)
class Finding:
    figure: Figure
    words: Words
    unit: str  # the unit to show values in, and its size in that of the figure
    factor: float
    variants: tuple[VariantFinding, ...]

    def number(self, value: float) -> str:
        """Write a value with three significant digits, or all before the point."""
        scaled = value / self.factor
        size = abs(scaled)
        # 99.95 and 9.995 round up to one digit more.
        digits = 0 if size >= 99.95 or not size else 1 if size >= 9.995 else 2
        return f"{scaled:.{digits}f}"

    def quantity(self, value: float) -> str:
        return f"{self.number(value)} {self.unit}"


def findings(result: BenchResult) -> tuple[Finding, ...]:
    return tuple(_finding(figure, result.variants) for figure in result.figures)


def _finding(figure: Figure, variants: tuple[Variant, ...]) -> Finding:
    words = _WORDS.get(figure.unit, AMOUNT)
    found: list[VariantFinding] = []
    for variant in variants:
        values = tuple(known.get(figure.name, math.nan) for known in variant.rounds)
        base = found[0].values if found else None
        found.append(_variant_finding(variant.name, values, base, words))
    known = [value for variant in found for value in variant.known_values]
    return Finding(figure, words, *scale_for(figure.unit, known), tuple(found))


def _variant_finding(
    name: str, values: tuple[float, ...], base: tuple[float, ...] | None, words: Words
) -> VariantFinding:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return VariantFinding(name, values, None, None, None)
    comparison = None if base is None else compare(base, values, words=words)
    return VariantFinding(name, values, spread(known), interval_of_mean(known), comparison)


# Keeps a line within 100 columns: two columns of names, one of values, one of verdicts.
_TITLE_MAX: Final = 28
_VARIANT_MAX: Final = 15
_GAP: Final = "  "


# The cells of a row, and the style of the last one.
_Row = tuple[tuple[str, str, str, str], str | None]


def table(result: BenchResult) -> str:
    """Return the table, grouped by workload; colour follows `output.wants_colour`."""
    found = findings(result)
    if not found:
        return "nothing was measured"
    base = _shorten(result.variants[0].name, _VARIANT_MAX)
    head = ("FIGURE", "VARIANT", "MEDIAN (RANGE)", f"AGAINST {base}")
    groups: dict[str | None, list[_Row]] = defaultdict(list)
    for finding in found:
        groups[finding.figure.workload] += _rows(finding)
    rows = [cells for group in groups.values() for cells, _ in group]
    widths = [max(len(cells[i]) for cells in (head, *rows)) for i in range(3)]
    lines = [colored(_line(head, widths), "bold")]
    for workload, group in groups.items():
        lines += ["", colored(one_line(workload or "whole round"), "bold")]
        lines += [_line(cells, widths, style) for cells, style in group]
    if result.rounds == 1 and len(result.variants) > 1:
        lines += ["", ONE_ROUND]
    return "\n".join(lines)


def _rows(finding: Finding) -> Iterator[_Row]:
    """Yield a row for each variant; a long title continues in the next row."""
    titles = wrap(one_line(finding.figure.title), _TITLE_MAX) or [""]
    for title, variant in zip_longest(titles, finding.variants):
        if variant is None:
            yield (title, "", "", ""), None
            continue
        name, comparison = _shorten(variant.name, _VARIANT_MAX), variant.comparison
        style = None
        if comparison and comparison.is_different:
            style = "green" if comparison.is_better(finding.words) else "red"
        yield (title or "", name, values_text(variant, finding), variant.verdict), style


def values_text(variant: VariantFinding, finding: Finding) -> str:
    """Return the median and the range: `41.2 ms (40.1–43.0)`."""
    if variant.spread is None:
        return "-"
    median, low, high = variant.spread
    text = finding.quantity(median)
    if len(variant.known_values) == 1:
        return text
    return f"{text} ({finding.number(low)}–{finding.number(high)})"


def _line(cells: Sequence[str], widths: Sequence[int], style: str | None = None) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, (*widths, 0), strict=True)]
    if style:
        padded[-1] = colored(padded[-1], style)
    return _GAP.join(padded).rstrip()


def _shorten(text: str, limit: int) -> str:
    text = one_line(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
