"""The tables of verdicts: one for each workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from supervisor.bench.findings import Finding, VariantFinding
from supervisor.bench.report.marker import KINDS
from supervisor.bench.report.markup import element
from supervisor.bench.report.overview import verdict_class
from supervisor.bench.report.plot import capitalised


def verdict_tables(found: Sequence[Finding]) -> Iterator[Element]:
    for workload in dict.fromkeys(one.figure.workload for one in found):
        yield element("h3", capitalised(workload or "whole round"))
        bodies = (_body(one) for one in found if one.figure.workload == workload)
        yield element("table", _head(found[0].variants[0].name), *bodies)


def _head(base: str) -> Element:
    names = ("Variant", "Median", "Range", f"Against {base}")
    return element("thead", element("tr", *(element("th", name, scope="col") for name in names)))


def _body(finding: Finding) -> Element:
    better = "higher is better" if finding.figure.is_higher_better else "lower is better"
    note = element("span", f" {finding.scale.unit}, {better}", class_="quiet")
    heading = element("th", capitalised(finding.figure.title), note, colspan="4", scope="rowgroup")
    rows = (_row(finding, one, place) for place, one in enumerate(finding.variants))
    return element("tbody", element("tr", heading, class_="figure"), *rows)


def _row(finding: Finding, variant: VariantFinding, place: int) -> Element:
    number, spread = finding.scale.number, variant.spread
    mark = element("span", "", class_=f"key variant-{place % KINDS}", aria_hidden="true")
    return element(
        "tr",
        element("th", mark, variant.name, scope="row"),
        element("td", number(spread.median) if spread else "none"),
        element("td", _range(finding, variant), class_="quiet range"),
        element("td", _verdict(variant), class_=verdict_class(finding, variant)),
    )


def _range(finding: Finding, variant: VariantFinding) -> str:
    number, spread = finding.scale.number, variant.spread
    return f"{number(spread.low)}–{number(spread.high)}" if spread else ""


def _verdict(variant: VariantFinding) -> str:
    return variant.comparison.verdict if variant.comparison else ""
