"""What becomes of a canary, from the figures of both sides. Pure.

A crash withdraws it, and so does what is shown to be worse before its time is over: more errors, or
slower by more than the margin. When its time is over it is promoted where the intervals exclude
that it is slower by more than the margin, and withdrawn where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.canary.error_rate import least_increase
from supervisor.trial.figures import Side, TrialFigures
from supervisor.trial.verdict import FigureVerdict, TrialVerdict, verdict_over_time

# Nobody notices a first token that comes later by less.
_UNNOTICED_S: Final = 0.05

Step = Literal["wait", "promote", "withdraw"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now; `reason` is a clause for people."""

    step: Step
    reason: str


@dataclass(frozen=True, slots=True)
class _Slowness:
    """One figure: by how many times as slow the canary is, at least and at most."""

    name: str
    low: float
    high: float
    outcome: str
    is_different: bool


def decide(figures: TrialFigures, margin: float, *, is_over: bool) -> Decision:
    base, tried = figures.sides["base"], figures.sides["trial"]
    if tried.crashes:
        return Decision("withdraw", "its engine crashed")
    if least_increase(_errors(base), _errors(tried)) > 0:
        return Decision(
            "withdraw", f"it has more errors: {_share_text(tried)} against {_share_text(base)}"
        )
    found = list(_slownesses(verdict_over_time(figures)))
    if slow := [one for one in found if one.is_different and one.low > 1 + margin]:
        return Decision("withdraw", _text(slow))
    if not is_over:
        return Decision("wait", "")
    if unknown := [one for one in found if one.high > 1 + margin]:
        return Decision(
            "withdraw",
            f"{_text(unknown)}; it may be slower by more than {100 * margin:g} %",
        )
    return Decision("promote", _text(found))


def _slownesses(found: TrialVerdict) -> Iterator[_Slowness]:
    yield _slowness("tokens/s", found.tokens_per_second, _inverse)
    first = found.first_token_s
    if not _is_unnoticed(first):
        yield _slowness("first token", first, _same)


def _slowness(
    name: str, found: FigureVerdict, ends: Callable[[float, float], tuple[float, float]]
) -> _Slowness:
    one = found.comparison
    low, high = ends(one.low, one.high)
    return _Slowness(name, low, high, found.outcome, one.is_different)


def _inverse(low: float, high: float) -> tuple[float, float]:
    return 1 / high if high else math.inf, 1 / low if low else math.inf


def _same(low: float, high: float) -> tuple[float, float]:
    return low, high


def _is_unnoticed(found: FigureVerdict) -> bool:
    known = found.base is not None and found.trial is not None
    return known and (found.trial or 0.0) - (found.base or 0.0) < _UNNOTICED_S


def _errors(side: Side) -> tuple[int, int]:
    return side.errors, side.requests


def _share_text(side: Side) -> str:
    return f"{side.errors} of {side.requests} requests"


def _text(found: list[_Slowness]) -> str:
    return ", ".join(f"{one.name} {one.outcome}" for one in found)
