"""Print every item of the seed documents with the tests that hold it; exit 1 if one has none.

A seed is a document whose interface or behaviour this project has; `seeds.toml` names the tests of
each of its items.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_TEST: Final = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a seed; `tests` are FILE::FUNCTION."""

    seed: str
    name: str
    tests: Sequence[str]


def items_of(text: str) -> list[Item]:
    """Return the items of a table, in order."""
    return [
        Item(seed, name, tests)
        for seed, table in tomllib.loads(text).items()
        for name, tests in table["items"].items()
    ]


def faults(items: Sequence[Item], root: Path) -> Iterator[str]:
    """Yield each item without a test, and each test that is not there."""
    functions: dict[str, frozenset[str]] = {}
    for item in items:
        if not item.tests:
            yield f"{item.seed} {item.name}: no test"
        for test in item.tests:
            path, _, function = test.partition("::")
            if path not in functions:
                functions[path] = _functions(root / path)
            if function not in functions[path]:
                yield f"{item.seed} {item.name}: there is no {test}"


def table(items: Sequence[Item]) -> str:
    """Return a line for each test of each item."""
    width = max((len(item.name) for item in items), default=0)
    return "\n".join(
        f"{item.seed}  {item.name:<{width}}  {test}" for item in items for test in item.tests
    )


def _functions(path: Path) -> frozenset[str]:
    return frozenset(_TEST.findall(path.read_text("utf-8"))) if path.is_file() else frozenset()


def main(items_file: Path = ROOT / "scripts" / "seeds.toml") -> int:
    items = items_of(items_file.read_text("utf-8"))
    print(table(items))
    found = list(faults(items, ROOT))
    print("\n".join(["", *found, f"{len(items)} items, {len(found)} faults"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
