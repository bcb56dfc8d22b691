"""Run llama.cpp's server tests on the engine and through llama-corral, and compare.

Models of a hub are replaced by tiny ones that are made here, so tests of a model's answers fail in
both runs; in router mode they have the names of the hub. Tests that download a file are skipped.
Exits with 1 if a test passes on the engine and fails through llama-corral, and `decisions.toml`
beside this file does not say why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from support import tiny_bert, tiny_gguf

from scripts.bench.overhead_fronts import free_port
from scripts.llama_cpp.outcomes import Comparison, Outcome, compare, decisions, read_outcomes
from scripts.llama_cpp.plugin import IS_CORRAL, MODELS, ONLY
from supervisor.output import table
from supervisor.system.paths import directories

_ROOT: Final = Path(__file__).parent.parent.parent
_REQUIREMENTS: Final = ("requests", "wget", "openai", "pytest", "pytest-timeout")
_TEST_MAX_S: Final = 60


def main() -> int:
    options, words = _options()
    tests = options.source / "tools/server/tests"
    if not (tests / "unit").is_dir():
        sys.exit(f"{options.source} has no tools/server/tests: give a checkout of llama.cpp")
    with tempfile.TemporaryDirectory(prefix="lt") as name:
        directory = Path(name)
        _make_models(directory)
        site = _install()
        found = {how: _run(how, tests, directory, site, words) for how in ("direct", "corral")}
    return _report(found["direct"], compare(found["direct"], found["corral"], decisions()))


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("source", type=Path, help="a checkout of llama.cpp")
    return parser.parse_known_args()


def _make_models(directory: Path) -> None:
    tiny_gguf.make(directory / "tiny.gguf")
    tiny_bert.make(directory / "bert.gguf", "cls")
    tiny_bert.make(directory / "rank.gguf", "rank")


def _install() -> Path:
    """Put the tests' imports beside our own packages, without changing those."""
    site = directories().cache / "llama_cpp_tests"
    if site.is_dir():
        return site
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", site, *_REQUIREMENTS], check=True)
    return site


def _run(
    how: str, tests: Path, directory: Path, site: Path, words: Sequence[str]
) -> dict[str, Outcome]:
    junit = directory / f"{how}.xml"
    paths = (_ROOT, _ROOT / "tests", site)
    env = os.environ | {
        # The given path comes first: `scripts/engine_builds` names its engine so.
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", "."), *map(str, paths)]),
        "PORT": str(free_port()),
        "PYTHONDONTWRITEBYTECODE": "1",
        MODELS: str(directory),
    }
    if how == "corral":
        env |= {IS_CORRAL: "1", ONLY: str(directory / "direct.xml")}
    options = ["-q", "--tb=line", "--show-capture=no", "-p", "scripts.llama_cpp.plugin"]
    options += ["-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:xdist"]
    options += ["--timeout", str(_TEST_MAX_S), f"--junitxml={junit}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words], cwd=tests, env=env, check=False
    )
    return read_outcomes(junit) if junit.exists() else {}


def _report(direct: dict[str, Outcome], found: Comparison) -> int:
    counts = Counter(direct.values())
    rows = [
        ("tests", str(len(direct))),
        ("skipped", str(counts["skipped"])),
        ("passed on the engine", str(counts["passed"])),
        ("passed through llama-corral", str(found.passed)),
        ("different by decision", str(len(found.decided))),
        ("different", str(len(found.different))),
    ]
    print(table(("", "TESTS"), rows))
    for reason, number in Counter(found.decided.values()).most_common():
        print(f"{number:4} {reason}")
        for name in (name for name, why in found.decided.items() if why == reason):
            print(f"       {name}")
    for name in found.different:
        print(f"     {name}: no decision")
    for name in found.outdated:
        print(f"     {name} passes: remove it from decisions.toml")
    return 1 if found.different or not direct else 0


if __name__ == "__main__":
    sys.exit(main())
