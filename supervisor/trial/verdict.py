"""What the figures of a trial say. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.bench.comparison import (
    RATE,
    TIME,
    Comparison,
    Words,
    compare_unpaired,
    requests_to_go,
    spread,
)
from supervisor.trial.equal_load import Conversations, Picked, count, under_equal_load
from supervisor.trial.figures import SIDES, Side, TrialFigures
from supervisor.trial.over_time import Timed, compare_over_time

# Where the engines of one side have this many more requests at once, the figures tell that too.
_UNEQUAL_LOAD: Final = 0.5
_TO_GO_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class FigureVerdict:
    """One figure of both sides.

    Attributes:
        base: The median of its requests; None without any.
        trial: Likewise.
        outcome: The difference with its interval, or what it takes to see one.
        to_go: Requests of both sides that would show a difference of 5 %; None if not known.
        compared: Requests of both sides that ran under equal load.
    """

    base: float | None
    trial: float | None
    comparison: Comparison
    outcome: str
    to_go: int | None
    compared: int


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    tokens_per_second: FigureVerdict
    first_token_s: FigureVerdict
    notes: tuple[str, ...]


def verdict(figures: TrialFigures) -> TrialVerdict:
    """Compare conversations."""
    base, trial = (figures.sides[name] for name in SIDES)
    first_token_s = _figure(base.first_tokens_s, trial.first_tokens_s, TIME)
    notes = (_load_note(base, trial, first_token_s.compared), _excluded_note(figures))
    return TrialVerdict(
        tokens_per_second=_figure(base.rates, trial.rates, RATE),
        first_token_s=first_token_s,
        notes=tuple(filter(None, notes)),
    )


def verdict_over_time(figures: TrialFigures) -> TrialVerdict:
    """Compare moments, for a decision that nobody looks at before it is made."""
    base, trial = (figures.sides[name] for name in SIDES)
    return TrialVerdict(
        tokens_per_second=_figure_over_time(base.timed_rates, trial.timed_rates, RATE),
        first_token_s=_figure_over_time(
            base.timed_first_tokens_s, trial.timed_first_tokens_s, TIME
        ),
        notes=tuple(filter(None, [_excluded_note(figures)])),
    )


def _figure_over_time(base: Sequence[Timed], trial: Sequence[Timed], words: Words) -> FigureVerdict:
    comparison = compare_over_time(base, trial, words=words)
    own, tried = (_median([[value for _, value, _ in side]]) for side in (base, trial))
    return FigureVerdict(own, tried, comparison, _outcome_over_time(comparison), None, 0)


def _outcome_over_time(comparison: Comparison) -> str:
    if comparison.is_different:
        return comparison.verdict
    if math.isinf(comparison.high):
        return "too few requests under equal load to compare"
    return f"no difference seen ({comparison.low:.2f}–{comparison.high:.2f} ×)"


def _figure(all_base: Conversations, all_trial: Conversations, words: Words) -> FigureVerdict:
    base, trial = under_equal_load(all_base, all_trial)
    comparison, to_go = compare_unpaired(base, trial, words=words), requests_to_go(base, trial)
    compared, known = count(base) + count(trial), count(all_base) + count(all_trial)
    if to_go is not None:
        to_go = to_go * known // compared
    return FigureVerdict(
        base=_median(base or _values(all_base)),
        trial=_median(trial or _values(all_trial)),
        comparison=comparison,
        outcome=_outcome(comparison, to_go),
        to_go=to_go,
        compared=compared,
    )


def _values(conversations: Conversations) -> Picked:
    return [[value for value, _ in one] for one in conversations]


def _median(conversations: Sequence[Sequence[float]]) -> float | None:
    values = [value for one in conversations for value in one]
    return spread(values).median if values else None


def _outcome(comparison: Comparison, to_go: int | None) -> str:
    if comparison.is_different:
        return comparison.verdict
    if to_go is None:
        return "too few conversations under equal load to compare"
    interval = f"{comparison.low:.2f}–{comparison.high:.2f} ×"
    if to_go == 0:
        return f"no difference of 5 % or more ({interval})"
    more = "more than " if to_go >= _TO_GO_MAX else "about "
    return f"no difference seen yet ({interval}), {more}{_rounded(to_go)} requests to go"


def _rounded(count: int) -> int:
    """Round an estimate up to two digits."""
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return math.ceil(count / unit) * unit


def _load_note(base: Side, trial: Side, compared: int) -> str | None:
    if not (base.requests and trial.requests):
        return None
    own, tried = base.others / base.requests, trial.others / trial.requests
    if abs(own - tried) < _UNEQUAL_LOAD:
        return None
    return (
        f"a request met {own:.1f} others on its engine, one of the trial {tried:.1f}; "
        f"compared are {compared} requests under equal load"
    )


def _excluded_note(figures: TrialFigures) -> str | None:
    excluded = sum(side.excluded for side in figures.sides.values())
    if not excluded:
        return None
    which = f"{excluded} conversations are" if excluded > 1 else "1 conversation is"
    return f"{which} left out from where a side was full or not ready"
