"""What a search found, as figures, rows and JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.bench.comparison import spread
from supervisor.output import size
from supervisor.tune.goal import Figures, Goal
from supervisor.tune.quality import Quality
from supervisor.tune.trials import Trial, Trials
from supervisor.tune.variant import BASE, Variant

HEAD: Final = ("VARIANT", "ROUNDS", "AGAINST BASE", "NOTE")
# Below this, the best of many is as good as the base but for noise.
_BETTER: Final = 1.03
_Read = Callable[[Figures], float]


@dataclass(frozen=True, slots=True)
class Shown:
    """One figure: its name, and how to read and write it."""

    name: str
    read: _Read
    text: Callable[[float], str]


def shown(goal: Goal, prompt_tokens: int) -> tuple[Shown, ...]:
    """The figures of a goal; those it does not measure are left out."""
    decode = Shown("decoding, one stream", lambda one: one.decode, _tokens_per_s)
    title = f"first token after a prompt of {prompt_tokens}"
    first = Shown(title, lambda one: one.first_token_s, lambda value: f"{value * 1000:.0f} ms")
    total = Shown("all streams together", lambda one: one.total, _tokens_per_s)
    peak = Shown("peak memory", lambda one: float(one.peak_bytes), lambda value: size(int(value)))
    by_goal = {"latency": (decode, first), "throughput": (total,), "memory": (peak, decode)}
    return by_goal[goal.name]


def figure_lines(
    trials: Trials, variant: Variant, rounds: Iterable[int], figures: Iterable[Shown]
) -> Iterator[tuple[str, str]]:
    """Each figure of the base and of a variant, with its range over the rounds."""
    base, other = trials.pairs(variant, rounds)
    for one in figures if base else ():
        texts = [_range(one, list(map(one.read, found))) for found in (base, other)]
        yield one.name, f"{texts[0]} before, {texts[1]} now; {len(base)} rounds"


def rows(
    trials: Trials, qualities: Mapping[Variant, Quality], untried: Sequence[Variant]
) -> list[tuple[str, ...]]:
    """All variants, the best first; what there was no time for stands last."""
    known = sorted(trials, key=lambda one: -_known(trials.ratio(one.variant)))
    found = [
        (
            one.variant.name,
            str(len(one.rounds)),
            _ratio(trials.ratio(one.variant)) if one.variant != BASE else "-",
            one.failure or str(qualities.get(one.variant, "")),
        )
        for one in known
    ]
    return [*found, *((one.name, "0", "-", "no time to try it") for one in untried)]


def data(trials: Trials, qualities: Mapping[Variant, Quality]) -> list[dict[str, object]]:
    return [
        {
            "variant": one.variant.name,
            "flags": dict(one.variant.flags),
            "replicas": one.variant.replicas,
            "rounds": len(one.rounds),
            "ratio": _finite(trials.ratio(one.variant)),
            "failure": one.failure,
            "quality": str(qualities[one.variant]) if one.variant in qualities else None,
        }
        for one in trials
    ]


def best_so_far(trials: Trials) -> Trial | None:
    """The best of what was measured, if it seemed better than the base; rejected ones too."""
    known = [(trials.ratio(one.variant), one) for one in trials if one.variant != BASE]
    better = [(ratio, one) for ratio, one in known if ratio > _BETTER]
    return max(better, key=lambda pair: pair[0])[1] if better else None


def _range(one: Shown, values: Sequence[float]) -> str:
    found = spread(values)
    return f"{one.text(found.median)} ({one.text(found.low)} to {one.text(found.high)})"


def _tokens_per_s(value: float) -> str:
    return f"{value:.1f} tokens/s"


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f} ×"


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def _known(ratio: float) -> float:
    return -1.0 if math.isnan(ratio) else ratio
