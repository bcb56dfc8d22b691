"""Delete each row of the tables in states.py, one at a time; the tests must fail every time.

Each deletion is tested in a fork of this process, which has pytest loaded and replaces the module.
Nothing is written to disk.
"""

from __future__ import annotations

import ast
import copy
import importlib
import multiprocessing
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import hypothesis.strategies
import pytest

ROOT = Path(__file__).parent.parent
MODULE = "supervisor.engine.states"
SOURCE = ROOT / "supervisor" / "engine" / "states.py"
LAWS = ROOT / "tests" / "laws" / "test_lifecycle.py"
# The inputs of the last pass, so that --if-changed has nothing to do.
PASSED = ROOT / ".venv" / ".mutate_table"
NOTHING = "nothing deleted"
# The tests need no fixtures and plugins of the project, and the first failure is enough. Two
# plugins of pytest itself would collect garbage at the end.
PLAIN = (
    *("-x", "-q", "-c", os.devnull, "--noconftest", "--assert=plain", "--tb=no"),
    *("-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception"),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """The module without one row."""

    row: str
    source: str


def main() -> int:
    began_at_s = time.monotonic()
    tried = "".join(path.read_text("utf-8") for path in (SOURCE, LAWS, Path(__file__)))
    if "--if-changed" in sys.argv and PASSED.exists() and PASSED.read_text("utf-8") == tried:
        return 0
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.insert(0, str(ROOT))
    importlib.import_module("supervisor.engine.health")  # the laws need it, and it is slow
    mutants = list(mutants_of(SOURCE.read_text("utf-8")))
    # The unchanged module goes first: if it failed, the other failures would prove nothing.
    whole = Mutant(NOTHING, SOURCE.read_text("utf-8"))
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        passed = pool.map(passes, [whole, *mutants], chunksize=1)
    if not passed[0]:
        print(f"{LAWS.relative_to(ROOT)} fails as it is")
        return 1
    survivors = [mutant.row for mutant, went in zip(mutants, passed[1:], strict=True) if went]
    for row in survivors:
        print(f"unnoticed: {row}")
    took_s = time.monotonic() - began_at_s
    print(f"{len(mutants)} rows deleted, {len(survivors)} unnoticed, {took_s:.0f} s")
    if survivors or not mutants:
        return 1
    PASSED.write_text(tried, "utf-8")
    return 0


def mutants_of(text: str) -> Iterator[Mutant]:
    tree = ast.parse(text)
    for number, table in enumerate(tree.body):
        if not isinstance(table, ast.AnnAssign) or not isinstance(table.target, ast.Name):
            continue
        for path, label in rows(table):
            less = copy.deepcopy(tree)
            delete(less.body[number], path)
            yield Mutant(f"{table.target.id}: {label}", ast.unparse(less))


def rows(table: ast.AST) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the position (literal in walking order, entry) and the text of each row."""
    for nth, literal in enumerate(literals(table)):
        for entry, label in enumerate(labels(literal)):
            yield (nth, entry), label


def literals(table: ast.AST) -> list[ast.Dict | ast.Set]:
    """Return the dicts and sets of a table that contain rows, not other dicts."""
    found = [node for node in ast.walk(table) if isinstance(node, ast.Dict | ast.Set)]
    return [node for node in found if not any(isinstance(v, ast.Dict) for v in entries(node))]


def entries(literal: ast.Dict | ast.Set) -> Sequence[ast.expr]:
    return literal.values if isinstance(literal, ast.Dict) else literal.elts


def labels(literal: ast.Dict | ast.Set) -> list[str]:
    keys = literal.keys if isinstance(literal, ast.Dict) else [None] * len(literal.elts)
    return [
        f"line {value.lineno}: " + ": ".join(ast.unparse(part) for part in (key, value) if part)
        for key, value in zip(keys, entries(literal), strict=True)
    ]


def delete(table: ast.AST, path: tuple[int, int]) -> None:
    nth, entry = path
    literal = literals(table)[nth]
    if isinstance(literal, ast.Dict):
        del literal.keys[entry], literal.values[entry]
    else:
        del literal.elts[entry]


def passes(mutant: Mutant) -> bool:
    """Return whether the tests pass for a mutant; call it in its own process."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    hypothesis.settings.register_profile(
        "mutants", database=None, print_blob=False, phases=[hypothesis.Phase.generate]
    )
    hypothesis.settings.load_profile("mutants")
    try:
        replace_module(mutant.source)
    except (KeyError, NameError, TypeError, ValueError):
        return False
    return pytest.main([*PLAIN, str(LAWS)], plugins=[ExamplesLast()]) == pytest.ExitCode.OK


class ExamplesLast:
    """Runs the laws with generated examples last: they take a hundred times longer to fail."""

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        items.sort(key=lambda item: hypothesis.is_hypothesis_test(item.obj))


def replace_module(source: str) -> None:
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    exec(compile(source, str(SOURCE), "exec"), vars(module))  # noqa: S102 (our own source)


if __name__ == "__main__":
    sys.exit(main())
