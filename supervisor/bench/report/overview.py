"""The overview of one variant: how many times better or worse each figure is, with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree.ElementTree import Element

from supervisor.bench.findings import Finding, VariantFinding
from supervisor.bench.report.axis import Axis
from supervisor.bench.report.markup import element
from supervisor.bench.report.plot import capitalised, title

_WIDTH: Final = 360
_LEFT: Final = 10
_RIGHT: Final = 350
_TOP: Final = 22
_ROW: Final = 36
_HEADING: Final = 20
_AXIS: Final = 24
_TITLE_MAX: Final = 40
# The ends of the axis, as a ratio, and its ticks: the least that holds what is to be shown.
_REACHES: Final = ((1.1, 1.05), (1.25, 1.1), (1.5, 1.2), (2, 1.5), (4, 2), (10, 3), (100, 10))


@dataclass(frozen=True, slots=True)
class _Ratio:
    """How many times better, as logarithms; above 0 is better."""

    finding: Finding
    variant: VariantFinding
    middle: float
    low: float
    high: float


def overview(found: Sequence[Finding], place: int, name: str) -> Element | None:
    """Draw the variant at `place`, not the first; None if nothing could be compared."""
    ratios = [one for finding in found if (one := _ratio(finding, finding.variants[place]))]
    if not ratios:
        return None
    reach, tick = _reach(ratios)
    axis = Axis(-math.log(reach), math.log(reach), _LEFT, _RIGHT)
    rows = list(_placed(ratios))
    bottom = rows[-1][1] + _ROW
    own, base = (found[0].variants[i].name for i in (place, 0))
    text = " ".join(f"{title(one.finding)}: {_verdict(one.variant)}." for one in ratios)
    return element(
        "svg",
        element("title", f"{own} against {base}", id=f"{name}-title"),
        element("desc", text, id=f"{name}-desc"),
        *_axis_lines(axis, (reach, tick), bottom),
        *(part for one, top in rows for part in _drawn(one, axis, top)),
        viewBox=f"0 0 {_WIDTH} {bottom + _AXIS}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def _ratio(finding: Finding, variant: VariantFinding) -> _Ratio | None:
    found = variant.comparison
    if not found or not math.isfinite(found.ratio):
        return None
    ends = (found.low, found.ratio, found.high)
    if not all(0 < end < math.inf for end in ends):
        return None
    low, middle, high = map(math.log, ends)
    if finding.words.is_above_better:
        return _Ratio(finding, variant, middle, low, high)
    return _Ratio(finding, variant, -middle, -high, -low)


def _reach(ratios: Sequence[_Ratio]) -> tuple[float, float]:
    """Choose the axis by the ratios themselves; an interval may go beyond it."""
    largest = math.exp(max(abs(one.middle) for one in ratios))
    return next((one for one in _REACHES if one[0] >= largest * 1.03), _REACHES[-1])


def _axis_lines(axis: Axis, ratios: tuple[float, float], bottom: float) -> Iterator[Element]:
    yield element("text", "← worse", x=_LEFT, y=13, class_="name quiet")
    yield element("text", "better →", x=_RIGHT, y=13, class_="median quiet")
    for ratio in (*ratios, 1):
        for side in {1, -1} if ratio > 1 else {1}:
            x = axis.position(side * math.log(ratio))
            kind = "grid" if ratio > 1 else "axis"
            anchor = "start" if x <= _LEFT else "end" if x >= _RIGHT else "middle"
            yield element("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_=kind)
            yield element(
                "text", f"{ratio:g} ×" if ratio > 1 else "equal",
                x=x, y=bottom + 16, class_="tick", text_anchor=anchor,
            )  # fmt: skip


def _placed(ratios: Sequence[_Ratio]) -> Iterator[tuple[_Ratio | str, float]]:
    """Yield the ratios, below the headings of their workloads, each with its upper edge."""
    top, before = float(_TOP), object()
    for one in ratios:
        workload = one.finding.figure.workload
        if workload != before:
            yield workload or "whole round", top
            top, before = top + _HEADING, workload
        yield one, top
        top += _ROW


def _drawn(row: _Ratio | str, axis: Axis, top: float) -> Iterator[Element]:
    if isinstance(row, str):
        yield element("text", capitalised(row), x=_LEFT, y=top + 16, class_="heading")
        return
    kind = verdict_class(row.finding, row.variant)
    text = capitalised(row.finding.figure.title)
    text = text if len(text) <= _TITLE_MAX else f"{text[: _TITLE_MAX - 1]}…"
    yield element("text", text, x=_LEFT, y=top + 14, class_="name")
    yield element("text", _ratio_text(row), x=_RIGHT, y=top + 14, class_=f"median {kind}")
    yield _bar(row, axis, top + 26)


def _bar(one: _Ratio, axis: Axis, y: float) -> Element:
    low, middle, high = map(axis.position, (one.low, one.middle, one.high))
    return element(
        "g",
        element("line", x1=low, x2=high, y1=y, y2=y, class_="reach"),
        element("circle", cx=middle, cy=y, r=4.5, class_="dot"),
        class_=verdict_class(one.finding, one.variant),
    )


def verdict_class(finding: Finding, variant: VariantFinding) -> str:
    """Return the style class of a verdict: better, worse or same."""
    found = variant.comparison
    if not found or not found.is_different:
        return "same"
    return "better" if found.is_better(finding.words) else "worse"


def _ratio_text(one: _Ratio) -> str:
    verdict = _verdict(one.variant)
    return verdict.partition(" (")[0]


def _verdict(variant: VariantFinding) -> str:
    return variant.comparison.verdict if variant.comparison else ""
