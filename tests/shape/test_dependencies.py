"""Every distribution that the code imports is declared, and every declared one is imported."""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

from support.sources import ROOT, imported_modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OURS = {"supervisor", "proxy"}
# Modules of extras: the extra, and the only package that may import them.
EXTRA = {"opentelemetry": ("otel", "proxy/observe")}


def imported(roots: Iterable[Path]) -> set[str]:
    """Top-level modules that are imported by files below the roots, without those of Python."""
    paths = (path for root in roots for path in root.rglob("*.py"))
    names = {name.partition(".")[0] for path in paths for name in imported_modules(path)}
    return names - set(sys.stdlib_module_names) - OURS


def declared(requirements: Iterable[str]) -> set[str]:
    names = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return {normalized(name[0]) for name in names if name}


def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = PROJECT["optional-dependencies"]
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_dependencies_are_the_packages_that_the_code_imports() -> None:
    distributions = packages_distributions()
    used = {
        normalized(name)
        for module in imported([ROOT / "supervisor", ROOT / "proxy"]) - EXTRA.keys()
        for name in distributions[module]
    }
    assert used == declared(PROJECT["dependencies"])


def test_what_an_extra_installs_is_imported_in_one_package() -> None:
    for module, (extra, package) in EXTRA.items():
        assert module in imported([ROOT / package])
        others = [path for path in ROOT.glob("proxy/*") if path != ROOT / package]
        assert module not in imported([ROOT / "supervisor", *others])
        assert all(name.startswith(module) for name in declared(extras()[extra]))
