"""The generated parts of the documentation have all that the code has; nothing else changes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from proxy.upstream.endpoint_kinds import ENDPOINTS
from supervisor.engine.exit_cause import patterns
from supervisor.events import EVENTS
from supervisor.settings.reference import settings_reference

ROOT = Path(__file__).parents[2]
GENERATED = runpy.run_path(str(ROOT / "scripts/docs_site/generated.py"))


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (
            "docs/settings.md",
            [f"| `{setting.key[-1]}` |" for setting in settings_reference()],
        ),
        (
            "docs/commands.md",
            ["## corral serve\n", "## corral model get\n", "## corral requests\n"],
        ),
        ("docs/troubleshooting.md", [f"| `{cause.code}` |" for _, cause in patterns("failure")]),
        ("docs/http-api.md", [f"| `POST {path}` |" for path in ENDPOINTS["POST"]]),
        ("docs/events.md", [f"| {event} |" for event in EVENTS]),
    ],
)
def test_a_page_has_everything(page: str, words: list[str]) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert [word for word in words if word not in text] == []


def test_a_part_is_written_anew_over_any_content(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin = "<!-- endpoints: written by scripts/docs --write -->"
    page.write_text(f"before\n{begin}\n<<<<<<< ours\n=======\n<!-- end of endpoints -->\nafter\n")
    text = GENERATED["current"](page)
    assert text.startswith(f"before\n{begin}\n\n| endpoint | kind |\n")
    assert text.endswith("|\n\n<!-- end of endpoints -->\nafter\n")
    assert "<<<" not in text


def test_a_part_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- nothing: written by scripts/docs --write -->\n<!-- end of nothing -->\n")
    with pytest.raises(KeyError):
        GENERATED["current"](page)
