"""The page of the comparison, from samples of results."""

from datetime import UTC, datetime

from scripts.bench.page import About, PartOutcome, page
from scripts.bench.parts import Part
from scripts.bench.result import Figure, Result, one_round

ABOUT = About(datetime(2026, 1, 2, 3, 4, tzinfo=UTC), {"engine": "llama-server 10434"})
PART = Part("Defaults", "scripts/bench/defaults", "Profiles against plain.")


def rendered(*outcomes: PartOutcome) -> list[str]:
    return page(ABOUT, outcomes).splitlines()


def test_a_cell_has_median_spread_and_the_ratio_round_by_round() -> None:
    values = {"plain": [100.0, 110.0, 50.0], "base": [110.0, 220.0, 60.0]}
    figure = Figure("decode", "tokens/s", values, base="plain")
    lines = rendered(PartOutcome(PART, 12.4, Result([figure])))
    assert "|  | plain | base |" in lines
    cells = "100 (50 to 110) | 110 (60 to 220) × 1.2 (1.1 to 2)"
    assert f"| decode, tokens/s (× of plain) | {cells} |" in lines
    assert "Profiles against plain. (`scripts/bench/defaults`, 12 s)" in lines
    assert "| date | 2026-01-02 03:04 UTC |" in lines
    assert "| engine | llama-server 10434 |" in lines


def test_figures_of_other_variants_have_a_separate_table() -> None:
    found = Result([one_round("loads", "", {"a": 3}), one_round("RSS", "MB", {"corral": 65.25})])
    lines = rendered(PartOutcome(PART, 1, found))
    assert {"|  | a |", "| loads | 3 |", "|  | corral |", "| RSS, MB | 65.2 |"} <= {*lines}


def test_a_round_without_a_base_has_no_ratio() -> None:
    figure = Figure("wait", "s", {"plain": [0.0], "base": [1.5]}, base="plain")
    assert "| wait, s (× of plain) | 0 | 1.5 |" in rendered(PartOutcome(PART, 1, Result([figure])))


def test_goals_and_notes_are_listed() -> None:
    found = Result([], {"as fast (1.2)": True, "small | tidy (90 MB)": False}, notes=["A note."])
    lines = rendered(PartOutcome(PART, 1, found))
    assert {"- met: as fast (1.2)", "- **missed**: small \\| tidy (90 MB)", "A note."} <= {*lines}


def test_a_failed_part_is_named_with_its_error_and_the_others_remain() -> None:
    works = PartOutcome(PART, 1, Result([one_round("loads", "", {"a": 3})]))
    other = Part("Swap", "scripts/bench/swap", "Models.")
    lines = rendered(PartOutcome(other, 2, problem="exit code 1: no\nengine"), works)
    assert "**Failed:** exit code 1: no engine" in lines
    assert "| Swap | all of it | exit code 1: no engine |" in lines
    assert "| loads | 3 |" in lines


def test_missing_programs_are_named() -> None:
    found = Result([], not_measured={"nginx": "not installed"})
    lines = rendered(PartOutcome(PART, 1, found))
    assert "| Defaults | nginx | not installed |" in lines
    assert "## GPU" not in lines


def test_without_a_gpu_the_page_says_that_no_figure_exists() -> None:
    found = Result([], not_measured={"GPU": "none"})
    lines = rendered(PartOutcome(PART, 1, found))
    assert any(line.startswith("**No GPU figure exists:**") for line in lines)
