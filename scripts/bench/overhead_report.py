"""What the figures of several repeats say: a table, and which targets are met.

A ratio is made within a repeat, where what else the machine does falls on all alike; what is shown
is the median over the repeats, with the least and the greatest in brackets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Figures:
    """What one repeat saw of one front.

    Attributes:
        byte_p50: Milliseconds to the first byte at one connection; so is `byte_p99`.
        per_core_s: Whole answers for each second of its processor time; 0 where it has none.
        per_s: Whole answers a second.
        token_p50: Milliseconds to the first token among many streams; so is `token_p99`.
        gap_p99: Milliseconds between two tokens of a stream.
        tokens_per_s: Tokens a second over all streams.
        core: Share of one core that it used meanwhile.
    """

    byte_p50: float
    byte_p99: float
    per_core_s: float
    per_s: float
    token_p50: float
    token_p99: float
    gap_p99: float
    tokens_per_s: float
    core: float


Run = Mapping[str, Figures]
"""One repeat: the figures by the name of the front."""


@dataclass(frozen=True)
class Target:
    """Something that has to hold of every run.

    Attributes:
        what: In words.
        most: The greatest value that is fine.
        values: One for each repeat.
    """

    what: str
    most: float
    values: Sequence[float]

    @property
    def is_met(self) -> bool:
        """Return whether the median is within the limit."""
        return statistics.median(self.values) <= self.most


def targets_of(runs: Sequence[Run]) -> list[Target]:
    """Return what has to hold of the proxy beside whom was there to compare."""
    targets = []
    if "nginx" in runs[0]:
        targets += [
            Target("added first byte p50, against nginx", 2.5, _ratios(runs, _added, "nginx")),
            Target(
                "first token p50 at 64 streams, against nginx",
                2,
                _ratios(runs, lambda run, name: run[name].token_p50, "nginx"),
            ),
        ]
    if "litellm" in runs[0]:
        values = _ratios(runs, _added, "litellm")
        targets.append(Target("added first byte p50, against LiteLLM", 0.1, values))
    lost = [1 - run["corral"].tokens_per_s / run["direct"].tokens_per_s for run in runs]
    targets.append(Target("tokens lost at 64 streams, against direct", 0.02, lost))
    return targets


def _ratios(
    runs: Sequence[Run],
    figure: Callable[[Run, str], float],
    rival: str,
) -> list[float]:
    return [figure(run, "corral") / figure(run, rival) for run in runs]


def _added(run: Run, name: str) -> float:
    return run[name].byte_p50 - run["direct"].byte_p50


def _added_p99(run: Run, name: str) -> float:
    return run[name].byte_p99 - run["direct"].byte_p99


_COLUMNS: Final[Mapping[str, Callable[[Run, str], float]]] = {
    "first byte p50 ms": lambda run, name: run[name].byte_p50,
    "added p50 ms": _added,
    "added p99 ms": _added_p99,
    "req/s at 32": lambda run, name: run[name].per_s,
    "req/core-s at 32": lambda run, name: run[name].per_core_s,
    "first token p50 ms at 64": lambda run, name: run[name].token_p50,
    "first token p99 ms at 64": lambda run, name: run[name].token_p99,
    "gap p99 ms at 64": lambda run, name: run[name].gap_p99,
    "tokens, of direct": lambda run, name: run[name].tokens_per_s / run["direct"].tokens_per_s,
    "core used at 64": lambda run, name: run[name].core,
}


def table(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return the lines of the table: a row for each figure, a column for each front."""
    rows = [["", *names]]
    for title, figure in _COLUMNS.items():
        cells = [spread([figure(run, name) for run in runs]) for name in names]
        rows.append([title, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def spread(values: Sequence[float]) -> str:
    """Return the median of some values and how far they lie apart."""
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:.3g}"
    return f"{_short(middle)} [{_short(min(values))} {_short(max(values))}]"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percentile_ms(values: Sequence[float], percent: int) -> float:
    """Return a percentile, 1 to 99, of at least two times in seconds, in milliseconds."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000
