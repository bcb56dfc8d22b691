"""`scripts/house` counts as documented."""

import runpy
from pathlib import Path

import pytest

HOUSE = runpy.run_path(str(Path(__file__).parent.parent.parent / "scripts/house.py"))

READER = '''"""Read, where there is something."""

from dataclasses import dataclass

from proxy import rules


@dataclass
class Value:
    """A value, or None where it waits."""

    size: int
    """In bytes,
    or 0."""
    name: str = "unknown"
    "A docstring too."


def read(values: list[Value]) -> list[int]:
    return [_size(one) for one in values if rules.allow(one)]


def _size(value: Value) -> int:
    return value.size
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path, text in {
        "proxy/__init__.py": "",
        "proxy/rules.py": "def allow(one: object) -> bool:\n    # of any kind\n    return True\n",
        "supervisor/__init__.py": "",
        "supervisor/files/__init__.py": "",
        "supervisor/files/reader.py": READER,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_the_figures_are_those_of_the_sources(checkout: Path) -> None:
    assert HOUSE["figures"](checkout) == {
        "files": "5",
        "median code lines of a file": "6",
        "files under 40 code lines": "100.0%",
        "modules with one importer": "20.0%",
        "folders in proxy; in supervisor": "0; 1",
        "loose files in proxy; in supervisor": "1; 0",
        "import lines, share of code": "16.7%",
        "private functions used once, at most 5 lines": "100.0%",
        "longest function; 90th percentile": "2; 2",
        "value types; Protocols": "1; 0",
        "files that one streaming chat touches": "-",
        "things called `one`": "2",
        '"where" for "if" in docstrings': "2",
        "code lines; docstring lines": "12; 5",
    }


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert HOUSE["main"]([str(tmp_path)]) == 2
    assert "has no supervisor/ and proxy/" in capsys.readouterr().err
