"""Every distribution that the code imports is declared, and every declared one is imported."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OURS = {"supervisor", "proxy"}


def imported(roots: Iterable[Path]) -> set[str]:
    """Top-level modules that are imported by files below the roots, without those of Python."""
    names = set()
    for path in (path for root in roots for path in root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - OURS


def declared(requirements: Iterable[str]) -> set[str]:
    names = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return {normalized(name[0]) for name in names if name}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_dependencies_are_what_the_code_imports() -> None:
    distributions = packages_distributions()
    used = {
        normalized(name)
        for module in imported([ROOT / "supervisor", ROOT / "proxy"])
        for name in distributions[module]
    }
    assert used == declared(PROJECT["dependencies"])
