"""The plot of one figure: the rounds of each variant, their median and the interval of the mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final
from xml.etree.ElementTree import Element

from supervisor.bench.findings import Finding, VariantFinding
from supervisor.bench.report.axis import Axis, axis_over
from supervisor.bench.report.marker import KINDS, marker
from supervisor.bench.report.markup import element

# The width is that of a phone, so that text keeps its size there.
_WIDTH: Final = 360
_LEFT: Final = 10
_RIGHT: Final = 350
_TOP: Final = 4
_ROW: Final = 48
_STRIP: Final = 30  # from the top of a row to the line its points lie on
_AXIS: Final = 38
_BAND: Final = 16
_SCATTER: Final = 12  # the rounds lie below each other over this height, the first on top
_DIGIT: Final = 7  # the width of one, at most
_NAME_MAX: Final = 30
# An interval of three values can be many times as wide as they are; the axis goes this
# much of the values' range beyond them.
_BEYOND: Final = 0.5


def plot(finding: Finding, name: str) -> Element:
    """Draw a figure; `name` is unique in the page."""
    rows = [(i, one) for i, one in enumerate(finding.variants) if one.spread]
    axis = _axis(finding, [row for _, row in rows])
    bottom = _TOP + _ROW * len(rows)
    return element(
        "svg",
        element("title", title(finding), id=f"{name}-title"),
        element("desc", description(finding), id=f"{name}-desc"),
        *_axis_lines(axis, bottom),
        *(
            part
            for i, (place, row) in enumerate(rows)
            for part in _row(row, finding, axis, (place, _TOP + _ROW * i))
        ),
        element("text", _unit_text(finding), x=_WIDTH / 2, y=bottom + 33, class_="unit"),
        viewBox=f"0 0 {_WIDTH} {bottom + _AXIS}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def title(finding: Finding) -> str:
    workload, words = finding.figure.workload, capitalised(finding.figure.title)
    return f"{words} ({workload})" if workload else words


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def description(finding: Finding) -> str:
    """Describe the plot for those who cannot see it."""
    return " ".join(_sentence(one, finding) for one in finding.variants)


def _sentence(variant: VariantFinding, finding: Finding) -> str:
    if variant.spread is None:
        return f"{variant.name}: no value."
    scale, spread = finding.scale, variant.spread
    text = (
        f"{variant.name}: median {scale.quantity(spread.median)} of {spread.count} rounds, "
        f"from {scale.number(spread.low)} to {scale.number(spread.high)}"
    )
    return f"{text}; {variant.comparison.verdict}." if variant.comparison else f"{text}."


def _unit_text(finding: Finding) -> str:
    better = "higher" if finding.figure.is_higher_better else "lower"
    return f"{finding.scale.unit}, {better} is better"


def _axis(finding: Finding, rows: list[VariantFinding]) -> Axis:
    known = [value for one in rows for value in one.known]
    reach = (max(known) - min(known)) * _BEYOND
    ends = [end for one in rows for end in one.interval or ()]
    inside = [min(max(end, min(known) - reach), max(known) + reach) for end in ends]
    scaled = [max(0.0, value) / finding.scale.factor for value in known + inside]
    return axis_over(scaled, _LEFT, _RIGHT)


def _axis_lines(axis: Axis, bottom: float) -> Iterator[Element]:
    for value, text in axis.ticks():
        x = axis.position(value)
        yield element("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid")
        half = _DIGIT * len(text) / 2
        middle = max(half, min(_WIDTH - half, x))
        yield element("text", text, x=middle, y=bottom + 15, class_="tick")
    yield element("line", x1=_LEFT, x2=_RIGHT, y1=bottom, y2=bottom, class_="axis")


def _row(
    row: VariantFinding, finding: Finding, axis: Axis, at: tuple[int, float]
) -> Iterator[Element]:
    place, top = at
    median = finding.scale.quantity(row.spread.median) if row.spread else ""
    yield element("text", _short(row.name), x=_LEFT, y=top + 13, class_="name")
    yield element("text", median, x=_RIGHT, y=top + 13, class_="median")
    strip = _strip(row, finding, axis, (place, top + _STRIP))
    yield element("g", *strip, class_=f"variant-{place % KINDS}")


def _strip(
    row: VariantFinding, finding: Finding, axis: Axis, at: tuple[int, float]
) -> Iterator[Element]:
    (place, middle), factor = at, finding.scale.factor
    if row.interval:
        low, high = (axis.position(end / factor) for end in row.interval)
        yield element(
            "rect",
            element("title", _interval_text(row.interval, finding)),
            x=low, y=middle - _BAND / 2, width=max(1.0, high - low), height=_BAND, rx=3,
            class_="interval",
        )  # fmt: skip
    for i, value in enumerate(row.values):
        if not math.isnan(value):
            y = middle + _scatter(i, len(row.values))
            text = f"round {i + 1}: {finding.scale.quantity(value)}"
            yield marker(place, axis.position(value / factor), y, text)
    if row.spread:
        x = axis.position(row.spread.median / factor)
        yield element("line", x1=x, x2=x, y1=middle - 11, y2=middle + 11, class_="middle")


def _interval_text(interval: tuple[float, float], finding: Finding) -> str:
    low, high = interval
    return f"95 % interval of the mean: {finding.scale.number(low)}–{finding.scale.quantity(high)}"


def _scatter(place: int, count: int) -> float:
    return 0.0 if count == 1 else _SCATTER * (place / (count - 1) - 0.5)


def _short(name: str) -> str:
    return name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX - 1]}…"
