"""Print every item of the seed documents with the tests that hold it; exit 1 if one has none.

A seed is a document whose interface or behaviour this project has; `seeds.toml` lists the items of
each. A test holds an item if its docstring or its name says `seed 003`, and all words of the item
are in its name, docstring or code. The docstring of its file counts as part of its own.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_ITEMS: Final = ROOT / "scripts" / "seeds.toml"
_WORD: Final = re.compile(r"\w+")
_SEED: Final = re.compile(r"(?<![a-z])seed[ _](\d{3})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SeedTest:
    """A test that names seeds."""

    name: str  # FILE::FUNCTION
    seeds: frozenset[str]
    words: frozenset[str]


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a seed."""

    seed: str
    name: str

    def tests(self, among: Iterable[SeedTest]) -> list[str]:
        """Return the names of the tests that hold it."""
        words = frozenset(_WORD.findall(self.name.lower()))
        return [one.name for one in among if self.seed in one.seeds and words <= one.words]


def items_of(text: str) -> list[Item]:
    """Return the items of a table, in order."""
    return [
        Item(seed, name) for seed, table in tomllib.loads(text).items() for name in table["items"]
    ]


def tests_below(directory: Path, root: Path) -> list[SeedTest]:
    """Return the tests that name a seed, of all files below a directory; names are below `root`."""
    files = sorted(directory.rglob("test_*.py"))
    return [
        test for path in files for test in _tests(path.read_text("utf-8"), path.relative_to(root))
    ]


def table(items: Sequence[Item], tests: Sequence[SeedTest]) -> str:
    """Return a line for each item and each of its tests."""
    width = max((len(item.name) for item in items), default=0)
    return "\n".join(line for item in items for line in _lines(item, tests, width))


def _lines(item: Item, tests: Sequence[SeedTest], width: int) -> Iterator[str]:
    head = f"{item.seed}  {item.name:<{width}}"
    for test in item.tests(tests) or ("NO TEST",):
        yield f"{head}  {test}"
        head = " " * len(head)


def _tests(source: str, path: Path) -> Iterator[SeedTest]:
    if not _SEED.search(source):
        return
    module = ast.parse(source)
    head = ast.get_docstring(module) or ""
    for node in _functions(module):
        named = f"{node.name}\n{ast.get_docstring(node) or ''}\n{head}"
        if seeds := frozenset(_SEED.findall(named)):
            text = f"{head}\n{ast.get_source_segment(source, node)}".lower()
            yield SeedTest(f"{path}::{node.name}", seeds, frozenset(_WORD.findall(text)))


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test_"
        ):
            yield node


def main() -> int:
    items, tests = items_of(_ITEMS.read_text("utf-8")), tests_below(ROOT / "tests", ROOT)
    print(table(items, tests))
    missing = [item for item in items if not item.tests(tests)]
    print(f"\n{len(items)} items, {len(tests)} tests, {len(missing)} items without a test")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
