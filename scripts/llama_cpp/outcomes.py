"""Outcomes of two runs of the same tests, and why they may differ. Pure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Outcome = Literal["passed", "failed", "skipped"]

# What llama-corral does otherwise by decision, by a part of a test's name. See proxy/DESIGN.md.
DECISIONS: Final[Mapping[str, str]] = {
    r"test_(tools_builtin|mcp_servers)": "no tools or MCP of the engine",
    r"cors|test_proxy::": "Origin and Host rules of its own",
    r"test_router": "models come from the settings",
    r"test_no_ui|static_assets": "no web page of the engine",
    r"test_slot_save": "clients do not save, restore or erase slots",
    r"test_lora": "clients do not change adapters",
    r"test_sleep": "ttl_s and keep_alive unload models",
    r"test_server_slots|test_metrics_disabled": "/slots and /metrics need no switch",
    r"test_metrics::": "/metrics is of all models",
    r"public_endpoint\[/(v1/)?models": "the list of models needs a key",
    r"test_incorrect_api_key": "errors have OpenAI's types",
    r"aliases_and_tags": "a model has no tags, and its name is no alias",
    r"with_image|vision_format_accepted|empty_messages": "a client's mistake is 400",
    r"llama_telemetry": "a response that was cut is incomplete",
    r"test_compat_gcp": "llama.cpp's own variables do not reach an engine",
    r"return_progress": "a warm engine has the first token in its cache",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tests by what became of them.

    Attributes:
        passed: How many passed in both runs.
        decided: Tests that differ by a decision, with it.
        different: Other tests that differ.
    """

    passed: int
    decided: Mapping[str, str]
    different: tuple[str, ...]


def read_outcomes(junit: Path) -> dict[str, Outcome]:
    """Read a JUnit file as pytest writes it; a test that was never run is missing."""
    cases = ET.parse(junit).iter("testcase")  # noqa: S314 (pytest wrote it here)
    return {f"{one.get('classname', '')}::{one.get('name', '')}": _outcome(one) for one in cases}


def _outcome(case: ET.Element) -> Outcome:
    if case.find("skipped") is not None:
        return "skipped"
    has_failed = case.find("failure") is not None or case.find("error") is not None
    return "failed" if has_failed else "passed"


def compare(direct: Mapping[str, Outcome], corral: Mapping[str, Outcome]) -> Comparison:
    """Compare what passed on the engine with the outcomes through llama-corral."""
    expected = sorted(name for name, outcome in direct.items() if outcome == "passed")
    lost = [name for name in expected if corral.get(name) != "passed"]
    reasons = {name: reason for name in lost if (reason := decision(name))}
    return Comparison(
        passed=len(expected) - len(lost),
        decided=reasons,
        different=tuple(name for name in lost if name not in reasons),
    )


def decision(name: str) -> str | None:
    return next((why for part, why in DECISIONS.items() if re.search(part, name)), None)
