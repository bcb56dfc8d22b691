"""Pages that are made from the code have all of it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from proxy.endpoints import ENDPOINTS
from supervisor.process.exit_patterns import FAILURE_PATTERNS
from supervisor.settings.reference import settings_reference

PAGES = runpy.run_path(str(Path(__file__).parents[2] / "scripts/docs_site/pages.py"))["PAGES"]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("settings.md", [f"| `{one.key[-1]}` |" for one in settings_reference()]),
        ("commands.md", ["## corral serve\n", "## corral model get\n", "## corral config set\n"]),
        ("troubleshooting.md", [f"| `{one.code}` |" for one in FAILURE_PATTERNS]),
        ("http-api.md", [f"| `POST {path}` |" for path in ENDPOINTS["POST"]]),
        ("architecture-proxy.md", ["# "]),
        ("changelog.md", ["## Unreleased"]),
    ],
)
def test_a_page_has_everything(page: str, words: list[str]) -> None:
    text = PAGES[page]()
    assert [word for word in words if word not in text] == []
