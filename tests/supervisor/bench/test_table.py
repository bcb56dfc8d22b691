import dataclasses
import math
import re

import pytest
from support.bench_result import FIGURES, result

from supervisor.bench.figures import RATE, Finding, Unit, findings, scale_for, table


def test_each_figure_has_a_line_for_each_variant_and_a_verdict_against_the_first() -> None:
    text = table(result(1, 1.4, 1))
    rows = [line.split("  ") for line in text.splitlines() if "tokens per second, alone" in line]
    assert len(rows) == 1
    alone = text[text.index("tokens per second, alone") :].splitlines()
    assert re.search(r"engine +82\.\d tokens/s \(\d\d\.\d–\d\d\.\d\)$", alone[0])
    assert re.search(r"base +11\d tokens/s \(11\d–11\d\) +1\.4\d? × faster \(.*–.*\)$", alone[1])
    assert re.search(r"low-latency +8\d\.\d tokens/s \(.*\) +no difference seen$", alone[2])
    assert [line for line in text.splitlines() if line and "  " not in line] == [
        "chat",
        "concurrent",
        "whole round",
    ]


def test_a_single_round_is_not_compared() -> None:
    text = table(result(1, 1.4, rounds=1))
    assert text.endswith("\n\none round: nothing can be compared")
    assert "too few" not in text
    assert "one round" not in table(result(1, rounds=1))


def test_a_line_fits_100_columns() -> None:
    names = ("a" * 60, "b" * 60, "c" * 60)
    assert max(map(len, table(result(1, 1.4, 0.1, names=names)).splitlines())) <= 100


def test_a_long_title_goes_on_beside_the_next_variant() -> None:
    full = result(1, 1.4)
    long = dataclasses.replace(full.figures[0], title="first token, 95 of 100, 2 clients a slot")
    text = table(dataclasses.replace(full, figures=(long,)))
    assert re.search(
        r"^first token, 95 of 100, 2 +engine .*\nclients a slot +base .* × shorter",
        text,
        re.MULTILINE,
    )
    alone = table(dataclasses.replace(full, figures=(long,), variants=full.variants[:1]))
    assert alone.endswith("\nclients a slot")


def test_names_cannot_control_the_terminal() -> None:
    assert "\x1b" not in table(result(1, 1, names=("a\x1b[31m", "b\n"), rounds=1))


def test_better_is_green_and_worse_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = table(result(1, 1.4, 0.7))
    assert set(re.findall(r"\[32m[\d.]+ × (\w+)", text)) == {"shorter", "faster", "less"}
    assert set(re.findall(r"\[31m[\d.]+ × (\w+)", text)) == {"longer", "slower", "more"}
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[3" not in table(result(1, 1.4, 0.7))


def test_without_figures_it_says_so() -> None:
    assert table(dataclasses.replace(result(), figures=())) == "nothing was measured"


def test_values_of_a_failed_round_stay_in_pairs() -> None:
    """The second variant has no third round; its fourth belongs to the fourth of the first."""
    full = result(1, 2, rounds=6, noise=0)
    base, other = full.variants
    grows = [{"concurrent.total_rate": 100.0 * i} for i in range(1, 7)]
    doubled = [{"concurrent.total_rate": 200.0 * i} for i in range(1, 7)]
    with_gap = dataclasses.replace(
        full,
        figures=tuple(figure for figure in full.figures if figure.name == "concurrent.total_rate"),
        variants=(
            dataclasses.replace(base, rounds=grows),
            dataclasses.replace(other, rounds=[*doubled[:2], {}, *doubled[3:]]),
        ),
    )
    (found,) = findings(with_gap)
    assert found.variants[1].comparison
    assert found.variants[1].comparison.verdict == "2.00 × faster (2.00–2.00)"
    assert math.isnan(found.variants[1].values[2])


def test_a_variant_without_a_figure_has_no_value() -> None:
    full = result(1, 1)
    empty = dataclasses.replace(full.variants[1], rounds=[{}] * 5, failure="exited")
    found = findings(dataclasses.replace(full, variants=(full.variants[0], empty)))
    assert found[0].variants[1].spread is None
    text = table(dataclasses.replace(full, variants=(full.variants[0], empty)))
    assert re.search(r"^ +base +-$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("ms", 212.4, "212 ms"),
        ("ms", 12_340, "12.3 s"),
        ("s", 0.0421, "42.1 ms"),
        ("s", 9.996, "10.0 s"),
        ("s", 0, "0 ms"),
        ("bytes", 431e6, "411 MiB"),
        ("bytes", 3 << 30, "3.00 GiB"),
        ("tokens/s", 99.96, "100 tokens/s"),
        ("tokens", 12345, "12345 tokens"),
        ("J", 15_000, "15.0 kJ"),
    ],
)
def test_quantities(unit: Unit, value: float, text: str) -> None:
    finding = Finding(FIGURES[0], RATE, *scale_for(unit, [value]), ())
    assert finding.quantity(value) == text
