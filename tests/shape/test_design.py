"""The design documents match the code."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_generated_parts_of_the_documentation_are_those_of_the_code() -> None:
    generated = runpy.run_path(str(ROOT / "scripts/docs_site/generated.py"))
    stale = [
        path.name for path in generated["files"]() if path.read_text() != generated["current"](path)
    ]
    assert stale == [], "run scripts/docs --write"


def test_the_architecture_lists_each_folder() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    folders = [
        path.parent
        for name in ("proxy", "supervisor")
        for path in ROOT.glob(f"{name}/*/__init__.py")
    ]
    assert [str(path.relative_to(ROOT)) for path in folders if f"{path.name}/`" not in page] == []
