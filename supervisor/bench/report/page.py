"""The page of a report: what came out first, then how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.etree.ElementTree import Element

from supervisor import __version__, output
from supervisor.bench.comparison import NO_DIFFERENCE, TOO_FEW
from supervisor.bench.findings import Finding, findings
from supervisor.bench.report.command_line import shell
from supervisor.bench.report.markup import Child, document, element
from supervisor.bench.report.overview import overview, verdict_class
from supervisor.bench.report.plot import plot, title
from supervisor.bench.report.verdicts import verdict_tables
from supervisor.bench.result import BenchResult
from supervisor.host.files import write_atomic

# Nothing is loaded and no script runs, also where a name from outside were not escaped.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE: Final = Path(__file__).with_name("style.css")
_HOW_TO_COMPARE: Final = (
    "Every round measured all variants, one after the other, and ratios are of values of the same "
    "round. The bar is their 95 % interval. A difference is claimed only where it would come out "
    "of identical variants less than once in 100 comparisons; “no difference seen” is not “equal”, "
    "because a difference smaller than the spread cannot be seen."
)
_HOW_TO_READ: Final = (
    "Each mark is one round, the first on top. The upright line is the median, the band the 95 % "
    "interval of the mean. Axes begin at 0 only where 0 is written."
)


def write_report(result: BenchResult, path: Path, repeat: str) -> None:
    """Write the report, as a whole or not at all.

    Args:
        repeat: The command that measures the same again.

    Raises:
        OSError: It cannot be written; a file of that name is unchanged.
    """
    write_atomic(path, report(result, repeat))


def report(result: BenchResult, repeat: str) -> str:
    """Return the report as HTML."""
    found = findings(result)
    return document(
        element(
            "html",
            _head(result),
            element(
                "body",
                element("header", *_header(result)),
                element("main", *_sections(result, found, repeat)),
                element("footer", element("p", f"Written by llama-corral {__version__}.")),
            ),
            lang="en",
        )
    )


def _head(result: BenchResult) -> Element:
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
    names = " · ".join(one.name for one in result.variants)
    yield element("p", names, class_="variants")
    rounds = f"{result.rounds} rounds" if result.rounds != 1 else "1 round"
    state = f", interrupted in round {result.rounds}" if result.is_interrupted else f", {rounds}"
    when = f"{result.began_at:%-d %B %Y, %H:%M %Z}".rstrip()
    yield element("p", f"{when}{state}, {output.duration(result.duration_s)}", class_="quiet")


def _sections(result: BenchResult, found: Sequence[Finding], repeat: str) -> Iterator[Element]:
    if not found:
        yield _section("Verdicts", element("p", "Nothing was measured."))
    else:
        yield _section("At a glance", *_overviews(found))
        yield _section("Verdicts", *verdict_tables(found))
        yield _section("Plots", element("p", _HOW_TO_READ, class_="quiet"), _plots(found))
    if result.notes:
        notes = element("ul", *(element("li", note) for note in result.notes))
        yield _section("Notes", notes)
    yield _section("What was measured", _facts(result))
    yield _section("Command lines", *_command_lines(result))
    yield _section("How to repeat it", element("pre", repeat))


def _section(heading: str, *children: Child) -> Element:
    return element("section", element("h2", heading), *children)


def _overviews(found: Sequence[Finding]) -> Iterator[Element]:
    base, *others = found[0].variants
    if not others:
        yield element("p", "One variant was measured, so there is nothing to compare it with.")
        return
    cards = (_overview(found, place, base.name) for place in range(1, len(others) + 1))
    yield element("p", _HOW_TO_COMPARE, class_="quiet")
    yield element("div", *cards, class_="cards")


def _overview(found: Sequence[Finding], place: int, base: str) -> Element:
    heading = element(
        "figcaption",
        element("strong", found[0].variants[place].name),
        f" against {base}: ",
        _headline(found, place),
    )
    drawn = overview(found, place, f"overview-{place}")
    return element("figure", heading, *([] if drawn is None else [drawn]))


def _headline(found: Sequence[Finding], place: int) -> str:
    variants = [finding.variants[place] for finding in found]
    kinds = [verdict_class(*pair) for pair in zip(found, variants, strict=True)]
    if counts := [
        f"{kind} in {kinds.count(kind)}" for kind in ("better", "worse") if kind in kinds
    ]:
        return f"{' and '.join(counts)} of {len(kinds)} figures"
    verdicts = {row.comparison.verdict for row in variants if row.comparison}
    return TOO_FEW if verdicts <= {TOO_FEW} else NO_DIFFERENCE


def _plots(found: Sequence[Finding]) -> Element:
    drawn = [one for one in found if any(variant.spread for variant in one.variants)]
    return element("div", *(_plot(one, i) for i, one in enumerate(drawn)), class_="cards")


def _plot(finding: Finding, number: int) -> Element:
    heading = element("figcaption", element("strong", title(finding)))
    return element("figure", heading, plot(finding, f"plot-{number}"))


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
