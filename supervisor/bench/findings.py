"""What a result says: for each figure, the spread of each variant and how it compares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.bench.comparison import (
    AMOUNT,
    RATE,
    TIME,
    Comparison,
    Spread,
    Words,
    compare,
    interval_of_mean,
    spread,
)
from supervisor.bench.figures import Figure, Unit
from supervisor.bench.quantities import Scale, scale_for
from supervisor.bench.result import BenchResult, Variant

_WORDS: Final[Mapping[Unit, Words]] = {"tokens/s": RATE, "s": TIME, "ms": TIME}


@dataclass(frozen=True, slots=True)
class VariantFinding:
    """One figure of one variant.

    Attributes:
        values: Of each round, nan where the round has none.
        spread: None without any value.
        interval: Of 95 %, of the geometric mean; None where there are too few values.
        comparison: Against the first variant, round by round; None for the first one itself, and
            without values.
    """

    name: str
    values: tuple[float, ...]
    spread: Spread | None
    interval: tuple[float, float] | None
    comparison: Comparison | None

    @property
    def known(self) -> tuple[float, ...]:
        return tuple(value for value in self.values if not math.isnan(value))


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure of all variants, in their order."""

    figure: Figure
    words: Words
    scale: Scale
    variants: tuple[VariantFinding, ...]


def findings(result: BenchResult) -> tuple[Finding, ...]:
    return tuple(_finding(figure, result.variants) for figure in result.figures)


def words_for(unit: Unit) -> Words:
    return _WORDS.get(unit, AMOUNT)


def _finding(figure: Figure, variants: tuple[Variant, ...]) -> Finding:
    words = words_for(figure.unit)
    values = [_by_round(variant, figure.name) for variant in variants]
    found = tuple(
        _variant_finding(variant.name, own, values[0] if i else None, words)
        for i, (variant, own) in enumerate(zip(variants, values, strict=True))
    )
    known = [value for one in found for value in one.known]
    return Finding(figure, words, scale_for(figure.unit, known), found)


def _by_round(variant: Variant, figure: str) -> tuple[float, ...]:
    """Return a value for every round, so that those of two variants stay in pairs."""
    return tuple((one or {}).get(figure, math.nan) for one in variant.rounds)


def _variant_finding(
    name: str, values: tuple[float, ...], base: tuple[float, ...] | None, words: Words
) -> VariantFinding:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return VariantFinding(name, values, None, None, None)
    comparison = None if base is None else compare(base, values, words=words)
    return VariantFinding(name, values, spread(known), interval_of_mean(known), comparison)
