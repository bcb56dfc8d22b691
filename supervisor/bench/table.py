"""The terminal table of a bench: a line for each figure of each variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Final

from supervisor.bench.findings import Finding, VariantFinding, findings
from supervisor.bench.result import BenchResult
from supervisor.output import colored, one_line

# Keeps a line within 100 columns: two columns of names, one of values, one of verdicts.
_TITLE_MAX: Final = 28
_VARIANT_MAX: Final = 15
_GAP: Final = "  "


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[str, str, str, str]
    verdict_style: str | None = None


def table(result: BenchResult) -> str:
    """Return the table, grouped by workload; colour follows `output.wants_colour`."""
    found = findings(result)
    if not found:
        return "nothing was measured"
    base = _short(result.variants[0].name, _VARIANT_MAX)
    head = ("figure", "variant", "median (range)", f"against {base}")
    groups = list(_groups(found))
    rows = [row for _, group in groups for row in group]
    widths = [
        max(len(cells[i]) for cells in (head, *(row.cells for row in rows))) for i in range(3)
    ]
    lines = [colored(_line(head, widths), "bold")]
    for workload, group in groups:
        lines += ["", colored(one_line(workload), "bold")]
        lines += [_styled(row, widths) for row in group]
    return "\n".join(lines)


def _groups(found: Sequence[Finding]) -> Iterator[tuple[str, list[_Row]]]:
    names = dict.fromkeys(one.figure.workload for one in found)
    for name in names:
        rows = [row for one in found if one.figure.workload == name for row in _rows(one)]
        yield name or "whole round", rows


def _rows(finding: Finding) -> Iterator[_Row]:
    """Yield a row for each variant; a long title goes on beside the next one."""
    titles = wrap(one_line(finding.figure.title), _TITLE_MAX) or [""]
    for title, variant in zip_longest(titles, finding.variants):
        if variant is None:
            yield _Row((title, "", "", ""))
            continue
        name = _short(variant.name, _VARIANT_MAX)
        cells = (title or "", name, _values(variant, finding), _verdict(variant))
        yield _Row(cells, _style(variant, finding))


def _values(variant: VariantFinding, finding: Finding) -> str:
    if variant.spread is None:
        return "-"
    scale, spread = finding.scale, variant.spread
    text = scale.quantity(spread.median)
    if spread.count == 1:
        return text
    return f"{text} ({scale.number(spread.low)}–{scale.number(spread.high)})"


def _verdict(variant: VariantFinding) -> str:
    return variant.comparison.verdict if variant.comparison else ""


def _style(variant: VariantFinding, finding: Finding) -> str | None:
    if variant.comparison is None or not variant.comparison.is_different:
        return None
    return "green" if variant.comparison.is_better(finding.words) else "red"


def _styled(row: _Row, widths: Sequence[int]) -> str:
    if row.verdict_style is None:
        return _line(row.cells, widths)
    before = _line((*row.cells[:3], ""), widths).ljust(sum(widths) + len(_GAP) * 3)
    return before + colored(row.cells[3], row.verdict_style)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, (*widths, 0), strict=True))
    return _GAP.join(padded).rstrip()


def _short(text: str, limit: int) -> str:
    text = one_line(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
