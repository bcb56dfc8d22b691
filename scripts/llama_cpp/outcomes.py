"""Outcomes of two runs of the same tests, and why they may differ. Pure."""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Outcome = Literal["passed", "failed", "skipped"]

_DECISIONS: Final = Path(__file__).with_name("decisions.toml")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tests by their outcome.

    Attributes:
        passed: How many passed in both runs.
        decided: Tests that differ by a decision, with it.
        different: Other tests that differ.
        outdated: Tests with a decision that pass in both runs.
    """

    passed: int
    decided: Mapping[str, str]
    different: tuple[str, ...]
    outdated: tuple[str, ...]


def read_outcomes(junit: Path) -> dict[str, Outcome]:
    """Read a JUnit file as pytest writes it; a test that was never run is missing."""
    cases = ET.parse(junit).iter("testcase")  # noqa: S314 (pytest wrote it here)
    return {
        f"{case.get('classname', '')}::{case.get('name', '')}": _outcome(case) for case in cases
    }


def _outcome(case: ET.Element) -> Outcome:
    if case.find("skipped") is not None:
        return "skipped"
    has_failed = case.find("failure") is not None or case.find("error") is not None
    return "failed" if has_failed else "passed"


def decisions(file: Path = _DECISIONS) -> dict[str, str]:
    """Return why llama-corral fails a test by decision, by the test's name."""
    table = tomllib.loads(file.read_text("utf-8"))
    return {
        f"{module}::{test}": reason
        for reason, tests_by_module in table.items()
        for module, tests in tests_by_module.items()
        for test in tests
    }


def compare(
    direct: Mapping[str, Outcome], corral: Mapping[str, Outcome], reasons: Mapping[str, str]
) -> Comparison:
    """Compare the tests that passed on the engine with the outcomes through llama-corral."""
    expected = sorted(name for name, outcome in direct.items() if outcome == "passed")
    lost = [name for name in expected if corral.get(name) != "passed"]
    return Comparison(
        passed=len(expected) - len(lost),
        decided={name: reasons[name] for name in lost if name in reasons},
        different=tuple(name for name in lost if name not in reasons),
        outdated=tuple(name for name in expected if name in reasons and name not in lost),
    )
