"""Results of several repeats: a table, and which targets are met.

Ratios are computed within a repeat, where other load on the machine affects all fronts alike. Shown
is the median over the repeats, with the minimum and the maximum in brackets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scripts.bench.result import Figure, Result


@dataclass(frozen=True)
class Figures:
    """Results of one front in one repeat.

    Attributes:
        byte_p50: Milliseconds to the first byte at one connection.
        late_p50: The same with an engine that takes 5 ms.
        json_per_core_s: JSON responses per CPU second of the front; 0 if it has no process.
        streams_per_core_s: The same of short streams.
        per_s: JSON responses per second.
        token_p50: Milliseconds to the first token of many concurrent streams.
        gap_p99: Milliseconds between two tokens of a stream.
        tokens_per_s: Of all streams.
        core: Share of one core that the front used for them.
    """

    byte_p50: float
    byte_p99: float
    late_p50: float
    json_per_core_s: float
    streams_per_core_s: float
    per_s: float
    token_p50: float
    token_p99: float
    gap_p99: float
    tokens_per_s: float
    core: float


Run = Mapping[str, Figures]
"""One repeat: figures by front."""


@dataclass(frozen=True)
class Target:
    """A limit for the median of `values`, one for each repeat.

    Attributes:
        is_minimum: Whether the limit is the lowest allowed value, not the highest.
        instead: A target that may be met in place of this one.
    """

    what: str
    limit: float
    values: Sequence[float]
    is_minimum: bool = False
    instead: Target | None = None

    @property
    def is_met(self) -> bool:
        if self.instead and self.instead.is_met:
            return True
        median = statistics.median(self.values)
        return median >= self.limit if self.is_minimum else median <= self.limit

    @property
    def text(self) -> str:
        bound = "at least" if self.is_minimum else "at most"
        text = f"{self.what}: {spread(self.values)}, {bound} {self.limit:g}"
        return f"{text}, or {self.instead.text}" if self.instead else text

    def __str__(self) -> str:
        return f"{self.text}: {'ok' if self.is_met else 'MISSED'}"


def targets_of(runs: Sequence[Run]) -> list[Target]:
    targets = _targets_against_before(runs) if "before" in runs[0] else []
    if "smg" in runs[0]:
        targets += [
            Target(
                f"{title}, against smg",
                limit,
                _ratios(runs, _COLUMNS[title], "smg"),
                is_minimum="/core-s" in title,
                instead=_per_core_s(runs, title),
            )
            for title, limit in _AGAINST_SMG.items()
        ]
    if "litellm" in runs[0]:
        values = _ratios(runs, _added, "litellm")
        targets.append(Target("added first byte p50, against LiteLLM", 0.1, values))
    lost = [1 - run["corral"].tokens_per_s / run["direct"].tokens_per_s for run in runs]
    targets.append(Target("tokens lost at 64 streams, against direct", 0.02, lost))
    return targets


def _per_core_s(runs: Sequence[Run], title: str) -> Target | None:
    """Return the rate that is enough at any rate of smg, if there is one."""
    if title not in _ENOUGH:
        return None
    values = [_COLUMNS[title](run, "corral") for run in runs]
    return Target(title, _ENOUGH[title], values, is_minimum=True)


def _targets_against_before(runs: Sequence[Run]) -> list[Target]:
    json = _ratios(runs, lambda run, name: run[name].json_per_core_s, "before")
    streams = _ratios(runs, lambda run, name: run[name].streams_per_core_s, "before")
    return [
        Target("JSON responses per core-second, against before", 0.98, json, is_minimum=True),
        Target("streams per core-second, against before", 0.98, streams, is_minimum=True),
    ]


def _ratios(runs: Sequence[Run], figure: Callable[[Run, str], float], other: str) -> list[float]:
    return [figure(run, "corral") / figure(run, other) for run in runs]


def _added(run: Run, name: str) -> float:
    return run[name].byte_p50 - run["direct"].byte_p50


def _added_p99(run: Run, name: str) -> float:
    return run[name].byte_p99 - run["direct"].byte_p99


def _added_late(run: Run, name: str) -> float:
    return run[name].late_p50 - run["direct"].late_p50


def _added_ratio(run: Run, name: str) -> float:
    return _added(run, "corral") / added if (added := _added(run, name)) else 0.0


_OTHERS: Final = ("nginx", "haproxy", "litellm", "smg")
_COLUMNS: Final[Mapping[str, Callable[[Run, str], float]]] = {
    "first byte p50 ms": lambda run, name: run[name].byte_p50,
    "added p50 ms": _added,
    "added p99 ms": _added_p99,
    "added p50, corral times": _added_ratio,
    "slow engine, first byte p50 ms": lambda run, name: run[name].late_p50,
    "slow engine, added p50 ms": _added_late,
    "slow engine, first byte p50, corral times": lambda run, name: (
        run["corral"].late_p50 / run[name].late_p50
    ),
    "req/s at 32": lambda run, name: run[name].per_s,
    "req/core-s at 32": lambda run, name: run[name].json_per_core_s,
    "streams/core-s at 32": lambda run, name: run[name].streams_per_core_s,
    "first token p50 ms at 64": lambda run, name: run[name].token_p50,
    "first token p99 ms at 64": lambda run, name: run[name].token_p99,
    "gap p99 ms at 64": lambda run, name: run[name].gap_p99,
    "tokens, of direct": lambda run, name: run[name].tokens_per_s / run["direct"].tokens_per_s,
    "core used at 64": lambda run, name: run[name].core,
}


_AGAINST_SMG: Final = {
    "slow engine, added p50 ms": 1.0,
    "added p99 ms": 2.0,
    "first token p50 ms at 64": 2.0,
    "core used at 64": 1.3,
    "req/core-s at 32": 0.43,
    "streams/core-s at 32": 0.7,
}
_ENOUGH: Final = {"req/core-s at 32": 4_500.0, "streams/core-s at 32": 4_000.0}


def result_of(runs: Sequence[Run], targets: Sequence[Target]) -> Result:
    """Return the figures of all fronts, and the missing programs."""
    names = [*runs[0]]
    figures = [
        Figure(
            title.replace(" ms", ""),
            "ms" if " ms" in title else "",
            {name: _known([figure(run, name) for run in runs]) for name in names},
        )
        for title, figure in _COLUMNS.items()
    ]
    missing = {name: "not installed" for name in _OTHERS if name not in names}
    return Result(figures, {target.text: target.is_met for target in targets}, missing)


def _known(values: list[float]) -> list[float]:
    """Leave out figures that the engine itself does not have, such as processor time of a front."""
    return values if any(values) else []


def table(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """A row for each figure, a column for each front."""
    rows = [["", *names]]
    for title, figure in _COLUMNS.items():
        cells = [spread([figure(run, name) for run in runs]) for name in names]
        rows.append([title, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def spread(values: Sequence[float]) -> str:
    """The median, with minimum and maximum."""
    middle = _short(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} [{_short(min(values))} {_short(max(values))}]"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percentile_ms(values: Sequence[float], percent: int) -> float:
    """A percentile, 1 to 99, of at least two times in seconds."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000
