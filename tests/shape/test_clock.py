"""No source waits by the wall clock: it jumps, and the monotonic clock does not."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = [*(ROOT / "supervisor").rglob("*.py"), *(ROOT / "proxy").rglob("*.py")]
# What is told to clients and kept in files is a date; nothing is waited for by these.
DATES = {"proxy/aggregate.py", "supervisor/proxy_adapter/model_loader.py"}


def reads_wall_clock(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "time"
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_waits_by_the_wall_clock(path: Path) -> None:
    assert not reads_wall_clock(path) or str(path.relative_to(ROOT)) in DATES
