"""Renders the results of all parts as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from scripts.bench.parts import Part
from scripts.bench.result import Figure, Result

_HEAD = """# Benchmarks

This page is written by `scripts/bench/all`. Each cell shows the median of the rounds, with the
lowest and the highest value in brackets. The number after × is the ratio to the variant named in
the first column, computed for each round. The variants of a part ran interleaved on one machine:
compare within a table, not between machines.
"""


@dataclass(frozen=True)
class About:
    """Where and when the page was made: rows of words."""

    date: datetime
    rows: Mapping[str, str]


@dataclass(frozen=True)
class PartOutcome:
    """The outcome of one part.

    Attributes:
        result: None if there is none.
        problem: Why there is none, or why its script failed although there is one; None without.
    """

    part: Part
    took_s: float
    result: Result | None = None
    problem: str | None = None


def page(about: About, outcomes: Sequence[PartOutcome]) -> str:
    sections = [_HEAD, _about(about), *map(_section, outcomes), _gpu(outcomes), _gaps(outcomes)]
    return "\n".join(filter(None, sections))


def _about(about: About) -> str:
    rows = {"date": f"{about.date:%Y-%m-%d %H:%M} UTC", **about.rows}
    return _table(["", ""], [[name, _escaped(value)] for name, value in rows.items()])


def _section(outcome: PartOutcome) -> str:
    part, result = outcome.part, outcome.result
    lines = [f"## {part.name}\n", f"{part.about} (`{part.script}`, {outcome.took_s:.0f} s)\n"]
    if outcome.problem:
        lines.append(f"**Failed:** {_escaped(outcome.problem)}\n")
    if result:
        lines += [*_figures(result.figures), *_goals(result.goals)]
        lines += [f"{_escaped(note)}\n" for note in result.notes]
    return "\n".join(lines)


def _figures(figures: Iterable[Figure]) -> list[str]:
    """Return a table for each set of variants."""
    groups: dict[frozenset[str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault(frozenset(figure.values), []).append(figure)
    return [_figure_table(group) for group in groups.values()]


def _figure_table(figures: Sequence[Figure]) -> str:
    names = [*figures[0].values]
    rows = [_row(figure, names) for figure in figures]
    return _table(["", *map(_escaped, names)], rows)


def _row(figure: Figure, names: Iterable[str]) -> list[str]:
    unit = f", {figure.unit}" if figure.unit else ""
    base = f" (× of {figure.base})" if figure.base else ""
    title = _escaped(f"{figure.name}{unit}{base}")
    return [title, *(_cell(figure, name, figure.values[name]) for name in names)]


def _cell(figure: Figure, name: str, values: Sequence[float]) -> str:
    if not values:
        return "-"
    if not figure.base or name == figure.base:
        return _spread(values)
    base = figure.values.get(figure.base, ())
    ratios = [value / other for value, other in zip(values, base, strict=False) if other]
    return f"{_spread(values)} × {_spread(ratios)}" if ratios else _spread(values)


def _spread(values: Sequence[float]) -> str:
    middle = _number(statistics.median(values))
    low, high = _number(min(values)), _number(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _goals(goals: Mapping[str, bool]) -> list[str]:
    lines = [
        f"- {'met' if is_met else '**missed**'}: {_escaped(goal)}" for goal, is_met in goals.items()
    ]
    return ["\n".join([*lines, ""])] if lines else []


def _gpu(outcomes: Iterable[PartOutcome]) -> str:
    missing = [
        entry for outcome in outcomes for entry in _not_measured(outcome) if entry[0] == "GPU"
    ]
    text = "## GPU\n\n**No GPU figure exists:** this page was made on a machine without a GPU.\n"
    return text if missing else ""


def _gaps(outcomes: Iterable[PartOutcome]) -> str:
    rows = [
        [outcome.part.name, _escaped(name), _escaped(reason)]
        for outcome in outcomes
        for name, reason in _not_measured(outcome)
    ]
    table = _table(["part", "not measured", "reason"], rows)
    return f"## Not measured\n\n{table}" if rows else ""


def _not_measured(outcome: PartOutcome) -> list[tuple[str, str]]:
    if outcome.result is None:
        return [("all of it", outcome.problem or "no result")]
    return [*outcome.result.not_measured.items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _escaped(text: str) -> str:
    """Keep a text in one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
