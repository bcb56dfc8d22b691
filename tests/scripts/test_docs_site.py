"""Pages that are made from the code have all of it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from proxy.endpoints import ENDPOINTS
from supervisor.process.exit_patterns import FAILURE_PATTERNS
from supervisor.settings.reference import settings_reference

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "scripts/docs_site/pages.py"))


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("settings", [f"| `{one.key[-1]}` |" for one in settings_reference()]),
        ("commands", ["## corral serve\n", "## corral model get\n", "## corral requests\n"]),
        ("troubleshooting", [f"| `{one.code}` |" for one in FAILURE_PATTERNS]),
        ("http-api", [f"| `POST {path}` |" for path in ENDPOINTS["POST"]]),
    ],
)
def test_a_page_has_everything(page: str, words: list[str]) -> None:
    text = MADE["on_page_markdown"]((ROOT / f"docs/{page}.md").read_text("utf-8"))
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("page", ["architecture-supervisor.md", "changelog.md"])
def test_pages_of_other_folders_are_there(page: str) -> None:
    assert MADE["PAGES"][page]().startswith("# ")
