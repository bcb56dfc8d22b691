"""The acceptance tests: `pytest -m acceptance`, or `scripts/NAME` for one of them.

Each is a program of minutes against real engines. Their modules share `tests/support`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if (ROOT / "scripts" / path.stem).exists()
)


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_the_program_finds_no_fault(name: str) -> None:
    subprocess.run([ROOT / "scripts" / name], check=True, cwd=ROOT)
