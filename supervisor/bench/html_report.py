"""The report of a bench: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree.ElementTree import Element, tostring

from supervisor import __version__, output
from supervisor.bench import figures
from supervisor.bench.figures import BenchResult, Comparison, Finding, VariantFinding, findings
from supervisor.output import printable
from supervisor.system.files import expand_home, write_atomic

Child = Element | str


def element(tag: str, *children: Child, **attributes: str | float) -> Element:
    """Make an element, with escapes for characters that cannot be printed.

    `class_` is the class, and `_` in an attribute's name stands for `-`.
    """
    texts = {
        name.rstrip("_").replace("_", "-"): printable(value)
        if isinstance(value, str)
        else f"{value:.1f}".removesuffix(".0")
        for name, value in attributes.items()
    }
    made = Element(tag, texts)
    for child in children:
        _append(made, child)
    return made


def _append(parent: Element, child: Child) -> None:
    if not isinstance(child, str):
        parent.append(child)
    elif len(parent):
        parent[-1].tail = (parent[-1].tail or "") + printable(child)
    else:
        parent.text = (parent.text or "") + printable(child)


# The marks of variants, which tell them apart without colour too.
_MARKS: Final = "●■◆▲▼▬"
KINDS: Final = len(_MARKS)

_TICKS: Final = 5
# The axis begins at zero if the values reach down far enough for that to cost little room.
_ZERO_BELOW: Final = 0.35
_MARGIN: Final = 0.06
# The margin on either side of a single value, or of equal values, as a share of the value.
_AROUND_EQUAL: Final = 0.05


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` at `left` to `high` at `right`."""

    low: float
    high: float
    left: float
    right: float

    def position(self, value: float) -> float:
        """Return the coordinate of a value; values beyond the axis are at its end."""
        share = (value - self.low) / (self.high - self.low)
        return self.left + max(0.0, min(1.0, share)) * (self.right - self.left)

    def ticks(self) -> list[tuple[float, str]]:
        least = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
        digits = max(0, -math.floor(math.log10(step)))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [(i * step, f"{i * step:.{digits}f}") for i in range(first, last + 1)]


def axis_over(values: Sequence[float], left: float, right: float) -> Axis:
    """Make an axis that holds all values, none of them negative."""
    low, high = min(values), max(values)
    if math.isclose(high, low):  # ticks between them would all be the same number
        around = high * _AROUND_EQUAL or 1
        return Axis(max(0.0, low - around), high + around, left, right)
    margin = (high - low) * _MARGIN
    return Axis(0.0 if low < high * _ZERO_BELOW else low - margin, high + margin, left, right)


# As wide as a phone, so that text keeps its size there.
_WIDTH: Final = 360
_LEFT: Final = 10
_RIGHT: Final = 350
_PLOT_TOP: Final = 4
_PLOT_ROW: Final = 48
_STRIP: Final = 30  # from the top of a row to the line its points lie on
_PLOT_AXIS: Final = 38
_BAND: Final = 16
_SCATTER: Final = 12  # height over which the rounds are spread, the first on top
_DIGIT: Final = 7  # the greatest width of a digit
_NAME_MAX: Final = 30
# The interval of three values can be many times as wide as their range; the axis extends beyond
# the values by at most this share of their range.
_BEYOND: Final = 0.5


def plot(finding: Finding, name: str) -> Element:
    """Draw a figure; `name` is unique in the page."""
    rows = [(i, variant) for i, variant in enumerate(finding.variants) if variant.spread]
    axis = _axis(finding, [row for _, row in rows])
    bottom = _PLOT_TOP + _PLOT_ROW * len(rows)
    parts = [
        *_plot_axis(axis, bottom),
        *(
            part
            for i, (place, row) in enumerate(rows)
            for part in _plot_row(row, finding, axis, (place, _PLOT_TOP + _PLOT_ROW * i))
        ),
        element("text", _unit_text(finding), x=_WIDTH / 2, y=bottom + 33, class_="unit"),
    ]
    description = " ".join(_sentence(variant, finding) for variant in finding.variants)
    return element(
        "svg",
        element("title", title(finding), id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *parts,
        viewBox=f"0 0 {_WIDTH} {bottom + _PLOT_AXIS}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def title(finding: Finding) -> str:
    workload, words = finding.figure.workload, capitalised(finding.figure.title)
    return f"{words} ({workload})" if workload else words


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sentence(variant: VariantFinding, finding: Finding) -> str:
    if variant.spread is None:
        return f"{variant.name}: no value."
    median, low, high = variant.spread
    text = (
        f"{variant.name}: median {finding.quantity(median)} of {len(variant.known_values)} rounds, "
        f"from {finding.number(low)} to {finding.number(high)}"
    )
    return f"{text}; {variant.comparison.verdict}." if variant.comparison else f"{text}."


def _unit_text(finding: Finding) -> str:
    better = "higher" if finding.figure.is_higher_better else "lower"
    return f"{finding.unit}, {better} is better"


def _axis(finding: Finding, rows: list[VariantFinding]) -> Axis:
    known = [value for row in rows for value in row.known_values]
    reach = (max(known) - min(known)) * _BEYOND
    ends = [end for row in rows for end in row.interval or ()]
    inside = [min(max(end, min(known) - reach), max(known) + reach) for end in ends]
    scaled = [max(0.0, value) / finding.factor for value in known + inside]
    return axis_over(scaled, _LEFT, _RIGHT)


def _plot_axis(axis: Axis, bottom: float) -> Iterator[Element]:
    for value, text in axis.ticks():
        x = axis.position(value)
        yield element("line", x1=x, x2=x, y1=_PLOT_TOP, y2=bottom, class_="grid")
        half = _DIGIT * len(text) / 2
        middle = max(half, min(_WIDTH - half, x))
        yield element("text", text, x=middle, y=bottom + 15, class_="tick")
    yield element("line", x1=_LEFT, x2=_RIGHT, y1=bottom, y2=bottom, class_="axis")


def _plot_row(
    row: VariantFinding, finding: Finding, axis: Axis, at: tuple[int, float]
) -> Iterator[Element]:
    place, top = at
    median = finding.quantity(row.spread[0]) if row.spread else ""
    name = row.name if len(row.name) <= _NAME_MAX else f"{row.name[: _NAME_MAX - 1]}…"
    yield element("text", name, x=_LEFT, y=top + 13, class_="name")
    yield element("text", median, x=_RIGHT, y=top + 13, class_="median")
    strip = _strip(row, finding, axis, (place, top + _STRIP))
    yield element("g", *strip, class_=f"variant-{place % KINDS}")


def _strip(
    row: VariantFinding, finding: Finding, axis: Axis, at: tuple[int, float]
) -> Iterator[Element]:
    (place, middle), factor = at, finding.factor
    if row.interval:
        low, high = row.interval
        left, right = axis.position(low / factor), axis.position(high / factor)
        text = f"95 % interval of the mean: {finding.number(low)}–{finding.quantity(high)}"
        yield element(
            "rect", element("title", text), class_="interval",
            x=left, y=middle - _BAND / 2, width=max(1.0, right - left), height=_BAND, rx=3,
        )  # fmt: skip
    last = len(row.values) - 1
    for i, value in enumerate(row.values):
        if not math.isnan(value):
            y = middle + (_SCATTER * (i / last - 0.5) if last else 0.0)
            text = f"round {i + 1}: {finding.quantity(value)}"
            mark, x = _MARKS[place % KINDS], axis.position(value / factor)
            yield element("text", element("title", text), mark, x=x, y=y, class_="mark")
    if row.spread:
        x = axis.position(row.spread[0] / factor)
        yield element("line", x1=x, x2=x, y1=middle - 11, y2=middle + 11, class_="middle")


# The ratios that a bar may reach, to either side; the smallest that holds all ratios is chosen.
_REACHES: Final = (1.1, 1.25, 1.5, 2, 4, 10, 100)
_BAR: Final = 160, 16


def reach_of(found: Sequence[Finding]) -> float:
    """Return the ratio at the ends of all bars; an interval may extend beyond it."""
    compared = [row.comparison for finding in found for row in finding.variants if row.comparison]
    ratios = [comparison.ratio for comparison in compared if 0 < comparison.ratio < math.inf]
    largest = max((max(ratio, 1 / ratio) for ratio in ratios), default=1.0)
    return next((reach for reach in _REACHES if reach >= largest * 1.03), _REACHES[-1])


def _bar(finding: Finding, comparison: Comparison, reach: float) -> Iterator[Element]:
    """Draw how many times better a variant is, with its interval; nothing if that is unknown."""
    ends = comparison.low, comparison.ratio, comparison.high
    if not all(0 < end < math.inf for end in ends):
        return
    (width, height), sign = _BAR, 1 if finding.words.is_above_better else -1
    axis = Axis(-math.log(reach), math.log(reach), 5, width - 5)
    low, middle, high = sorted(axis.position(sign * math.log(end)) for end in ends)
    y, centre = height / 2, width / 2
    yield element(
        "svg",
        element("line", x1=centre, x2=centre, y1=0, y2=height, class_="axis"),
        element("line", x1=low, x2=high, y1=y, y2=y, class_="reach"),
        element("circle", cx=middle, cy=y, r=4.5, class_="dot"),
        viewBox=f"0 0 {width} {height}",
        class_="bar",
        aria_hidden="true",
    )


def verdict_class(finding: Finding, variant: VariantFinding) -> str:
    """Return the style class of a verdict: better, worse or same."""
    found = variant.comparison
    if not found or not found.is_different:
        return "same"
    return "better" if found.is_better(finding.words) else "worse"


def shell(words: Iterable[str], home: Path | None = None) -> str:
    """Quote the words of a command; the home directory, which often names a person, becomes `~`."""
    start = f"{home or expand_home(Path('~'))}/"
    return " ".join(
        f"~/{shlex.quote(word.removeprefix(start))}"
        if word.startswith(start) and word != start
        else shlex.quote(word)
        for word in words
    )


def verdict_tables(found: Sequence[Finding]) -> Iterator[Element]:
    reach = reach_of(found)
    for workload in dict.fromkeys(finding.figure.workload for finding in found):
        yield element("h3", capitalised(workload or "whole round"))
        bodies = (_body(finding, reach) for finding in found if finding.figure.workload == workload)
        names = ("Variant", "Median", "Range", f"Against {found[0].variants[0].name}")
        cells = (element("th", name, scope="col") for name in names)
        yield element("table", element("thead", element("tr", *cells)), *bodies)


def _body(finding: Finding, reach: float) -> Element:
    note = element("span", f" {_unit_text(finding)}", class_="quiet")
    heading = element("th", capitalised(finding.figure.title), note, colspan="4", scope="rowgroup")
    rows = (_verdict_row(finding, place, reach) for place in range(len(finding.variants)))
    return element("tbody", element("tr", heading, class_="figure"), *rows)


def _verdict_row(finding: Finding, place: int, reach: float) -> Element:
    variant, number = finding.variants[place], finding.number
    spread, comparison = variant.spread, variant.comparison
    bar = _bar(finding, comparison, reach) if comparison and variant.verdict else ()
    mark = element("span", "", class_=f"key variant-{place % KINDS}", aria_hidden="true")
    return element(
        "tr",
        element("th", mark, variant.name, scope="row"),
        element("td", number(spread[0]) if spread else "none"),
        element("td", "–".join(map(number, spread[1:])) if spread else "", class_="quiet range"),
        element("td", *bar, variant.verdict, class_=verdict_class(finding, variant)),
    )


# Nothing is loaded and no script runs, even if a name from outside were not escaped.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE: Final = Path(__file__).with_name("style.css")
_HOW_TO_COMPARE: Final = (
    "Every round measured all variants, one after the other, and ratios are of values of the same "
    "round. A bar is their 95 % interval, better to the right, up to {:g} ×. A difference is "
    "claimed only where it would come out of identical variants less than once in 100 comparisons; "
    "“no difference seen” is not “equal”, as a difference below the spread cannot be seen."
)
_HOW_TO_READ: Final = (
    "Each mark is one round, the first on top. The upright line is the median, the band the 95 % "
    "interval of the mean. Axes begin at 0 only where 0 is written."
)


def write_report(result: BenchResult, path: Path, repeat: str) -> None:
    """Write the report atomically or raise OSError; `repeat` is the command to measure again."""
    write_atomic(path, report(result, repeat))


def report(result: BenchResult, repeat: str) -> str:
    found = findings(result)
    body = element(
        "body",
        element("header", *_header(result)),
        element("main", *_sections(result, found, repeat)),
        element("footer", element("p", f"Written by llama-corral {__version__}.")),
    )
    page = element("html", _page_head(result), body, lang="en")
    # The method `html` writes void elements without an end tag, and the text of <style> unescaped.
    return f"<!doctype html>\n{tostring(page, encoding='unicode', method='html')}\n"


def _page_head(result: BenchResult) -> Element:
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"corral bench: {result.model}"),
        element("style", _STYLE.read_text("utf-8")),
    )


def _header(result: BenchResult) -> Iterator[Element]:
    yield element("h1", f"corral bench: {result.model}")
    yield element("p", " · ".join(variant.name for variant in result.variants), class_="variants")
    rounds = f"{result.rounds} rounds" if result.rounds != 1 else "1 round"
    state = f", interrupted in round {result.rounds}" if result.is_interrupted else f", {rounds}"
    when = f"{result.began_at:%-d %B %Y, %H:%M %Z}".rstrip()
    yield element("p", f"{when}{state}, {output.duration(result.duration_s)}", class_="quiet")


def _sections(result: BenchResult, found: Sequence[Finding], repeat: str) -> Iterator[Element]:
    if not found:
        yield _section("Verdicts", element("p", "Nothing was measured."))
    else:
        yield _section("Verdicts", *_headlines(found), *verdict_tables(found))
        yield _section("Plots", element("p", _HOW_TO_READ, class_="quiet"), _plots(found))
    if result.notes:
        yield _section("Notes", element("ul", *(element("li", note) for note in result.notes)))
    yield _section("What was measured", _facts(result))
    yield _section("Command lines", *_command_lines(result))
    yield _section("How to repeat it", element("pre", repeat))


def _section(heading: str, *children: Child) -> Element:
    return element("section", element("h2", heading), *children)


def _headlines(found: Sequence[Finding]) -> Iterator[Element]:
    base, *others = found[0].variants
    if not others:
        yield element("p", "One variant was measured, so there is nothing to compare it with.")
        return
    if len(base.values) == 1:
        yield element("p", f"{capitalised(figures.ONE_ROUND)}.")
        return
    yield element("p", _HOW_TO_COMPARE.format(reach_of(found)), class_="quiet")
    for place, variant in enumerate(others, 1):
        text = f" against {base.name}: {_headline(found, place)}"
        yield element("p", element("strong", variant.name), text)


def _headline(found: Sequence[Finding], place: int) -> str:
    variants = [finding.variants[place] for finding in found]
    kinds = [verdict_class(*pair) for pair in zip(found, variants, strict=True)]
    if counts := [
        f"{kind} in {kinds.count(kind)}" for kind in ("better", "worse") if kind in kinds
    ]:
        return f"{' and '.join(counts)} of {len(kinds)} figures"
    verdicts = {row.comparison.verdict for row in variants if row.comparison}
    return figures.TOO_FEW if verdicts <= {figures.TOO_FEW} else figures.NO_DIFFERENCE


def _plots(found: Sequence[Finding]) -> Element:
    drawn = [finding for finding in found if any(variant.spread for variant in finding.variants)]
    figures = (
        element(
            "figure",
            element("figcaption", element("strong", title(finding))),
            plot(finding, f"plot-{i}"),
        )
        for i, finding in enumerate(drawn)
    )
    return element("div", *figures, class_="cards")


def _facts(result: BenchResult) -> Element:
    machine = result.machine
    cores = f"{machine.physical_cores} physical cores, {machine.logical_cores} logical"
    facts = {
        "Model": f"{result.model} ({result.model_file})",
        "Engine": result.engine,
        "Processor": f"{machine.processor}, {cores}",
        "Memory": output.size(machine.memory_bytes),
        "Devices": ", ".join(machine.devices) or "none",
        "System": machine.system,
        "Workloads": ", ".join(result.workloads),
        "Seed": str(result.seed),
    }
    pairs = (
        part
        for name, value in facts.items()
        for part in (element("dt", name), element("dd", value))
    )
    return element("dl", *pairs)


def _command_lines(result: BenchResult) -> Iterator[Element]:
    for variant in result.variants:
        yield element("h3", variant.name)
        if variant.failure:
            yield element("p", f"Not measured to the end: {variant.failure}", class_="worse")
        yield element("pre", shell(variant.argv))
