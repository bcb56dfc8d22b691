"""What the design documents say is what the code does."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_state_diagram_is_drawn_from_the_table() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts" / "diagram.py"))["diagram"]()
    written = re.search(
        r"```mermaid\n(.*?)\n```", (ROOT / "supervisor/DESIGN.md").read_text(), re.DOTALL
    )
    assert written
    assert written[1] == drawn


def test_the_table_of_events_is_drawn_from_the_code() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts" / "events.py"))["table"]()
    assert f"\n\n{drawn}\n\n" in (ROOT / "supervisor/DESIGN.md").read_text()


def test_the_architecture_says_what_each_folder_contains() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    folders = [
        path.parent
        for name in ("proxy", "supervisor")
        for path in ROOT.glob(f"{name}/*/__init__.py")
    ]
    assert [str(one.relative_to(ROOT)) for one in folders if f"{one.name}/`" not in page] == []
