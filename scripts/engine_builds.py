"""Run llama-corral's tests and checks with each of several builds of llama.cpp, and compare.

A BUILD is a number such as 11434, which `corral engine build` compiles unless it is installed, or
the path of a llama-server. `packaged` is the engine of the extra `[engine]`. A build takes the
place of the packaged engine: its files are copied into a Python package of the same name, which
PYTHONPATH names first, so the tests, the scripts and all daemons that they start find it alone.

The result of each check is added to build/engine_builds.json, and the table of all builds there is
printed and written to build/engine_builds.md. docs/engines.md has the conclusions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.builds import from_source
from supervisor.builds.discover import engine_pins, load
from supervisor.builds.installed import find_build
from supervisor.errors import EngineMissing
from supervisor.system.download import package_index
from supervisor.system.paths import directories, shipped_directory

ROOT: Final = Path(__file__).parent.parent
BUILD_DIR: Final = ROOT / "build"
PACKAGED: Final = "packaged"
_PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_TESTS: Final = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed|error).*?) in [\d.]+", re.MULTILINE)
_TIMEOUT_S: Final = 4 * 3600


@dataclass(frozen=True)
class Check:
    """A program, which exits with 0 if nothing is wrong.

    Attributes:
        result: Finds lines of its output that are the result, the last `lines` of them.
    """

    name: str
    argv: tuple[str, ...]
    result: re.Pattern[str] = re.compile(r"^ *(\S.*)$", re.MULTILINE)
    lines: int = 1
    env: Mapping[str, str] | None = None

    def read(self, output: str) -> str:
        found = self.result.findall(output)[-self.lines :]
        return "; ".join(" ".join(line.split()) for line in found)


def _script(path: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, path, *words)


CHECKS: Final = (
    Check(
        "tests",
        (*_PYTEST, "tests/end_to_end", "tests/laws", "tests/clients"),
        _TESTS,
    ),
    Check("slot files", (*_PYTEST, "tests/supervisor/slot_store", "tests/supervisor/rpc"), _TESTS),
    Check(
        "shapes",
        (*_PYTEST, "tests/laws/test_request_shapes.py"),
        _TESTS,
        env={"SHAPES": "500"},
    ),
    Check(
        "faults",
        (sys.executable, "-m", "faults", "--quick"),
        re.compile(r"^(\d+ faults, .*)$", re.MULTILINE),
    ),
    Check("kinds", _script("tests/acceptance/kinds.py"), lines=6),
    Check("host_cache_check", _script("tests/acceptance/host_cache_check.py"), lines=3),
    Check(
        "canary --kills",
        _script("scripts/bench/canary.py", "--clients", "6", "--turns", "120", "--kills", "30"),
        re.compile(r"^((?:our flags|exact kernels): .*)$", re.MULTILINE),
        lines=2,
    ),
    Check(
        "canary --new",
        _script("scripts/bench/canary.py", "--new", "--turns", "2000"),
        re.compile(r"^(new conversations: .*)$", re.MULTILINE),
    ),
    Check(
        "llama_cpp_tests",
        (sys.executable, "-m", "scripts.llama_cpp.server_tests", "{source}"),
        re.compile(r"^((?:passed|different).*\d)$", re.MULTILINE),
        lines=4,
    ),
    Check(
        "W1",
        _script("scripts/bench/affinity.py", "W1", "--seeds", "3", "--repeats", "1"),
        re.compile(r"^(least busy on .*)$", re.MULTILINE),
    ),
)


def main() -> int:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", nargs="+", metavar="BUILD")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CHECK")
    parser.add_argument("--source", type=Path, help="llama.cpp's sources, instead of the index's")
    options = parser.parse_args()
    chosen = [check for check in CHECKS if check.name in options.only]
    is_right = True
    for wanted in options.builds:
        with tempfile.TemporaryDirectory(prefix="eb") as directory:
            path = stand_in(wanted, Path(directory))
            name = f"b{load(path, cache_dir=Path(directory, 'cache')).build}"
            for check in chosen:
                is_right &= _run(check, name, path and Path(directory), options.source)
    shown = table(_results())
    (BUILD_DIR / "engine_builds.md").write_text(shown, "utf-8")
    print(shown)
    return 0 if is_right else 1


def stand_in(wanted: str, directory: Path) -> Path | None:
    """Make a Python package of an engine, and return its llama-server; None if it is packaged."""
    if wanted == PACKAGED:
        return None
    path = Path(wanted) if "/" in wanted else _compiled(wanted)
    pin = next(pin for pin in engine_pins(shipped_directory("vendor")) if pin.module)
    copy = directory / str(pin.module) / pin.binary
    shutil.copytree(path.parent, copy.parent, symlinks=True)
    (directory / str(pin.module) / "__init__.py").touch()
    return copy


def _compiled(build: str) -> Path:
    name, engines = f"b{build.removeprefix('b')}-{from_source.VARIANT}", directories().engines
    try:
        return find_build(name, engines).path(engines)
    except EngineMissing:
        command = [sys.executable, "-m", "supervisor.cli", "engine", "build", build]
        subprocess.run(command, check=True)
        return find_build(name, engines).path(engines)


def _source(build: str) -> Path:
    """Return llama.cpp's sources of a build, which are kept in the cache."""
    kept = directories().cache / "engine_builds" / build
    if not kept.is_dir():
        with package_index() as index, tempfile.TemporaryDirectory() as scratch:
            _, file = from_source.find_source(build, index)
            archive = index.download(file, Path(scratch), lambda *_: None)
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            (found,) = Path(scratch).glob("*/llama.cpp")
            shutil.copytree(found, kept)
    return kept


def _run(check: Check, build: str, package: Path | None, source: Path | None) -> bool:
    paths = [*([str(package)] if package else []), str(ROOT), str(ROOT / "tests")]
    env = {**os.environ, **(check.env or {}), "PYTHONPATH": os.pathsep.join(paths)}
    argv = [str(source or _source(build)) if word == "{source}" else word for word in check.argv]
    log = BUILD_DIR / "engine_builds" / f"{build}-{check.name.replace(' ', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    print(f"{build}: {check.name} → {log.relative_to(ROOT)}", file=sys.stderr, flush=True)
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            argv,
            check=False,
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
        )
    said = check.read(log.read_text("utf-8", "replace"))
    took_s = round(time.monotonic() - began_s)
    results = _results()
    results.setdefault(check.name, {})[build] = {
        "is_right": done.returncode == 0,
        "said": said or f"exit {done.returncode}",
        "took_s": took_s,
    }
    (BUILD_DIR / "engine_builds.json").write_text(json.dumps(results, indent=1), "utf-8")
    print(f"{build}: {check.name}: {said} ({took_s} s, exit {done.returncode})", file=sys.stderr)
    return done.returncode == 0


Results = dict[str, dict[str, dict[str, object]]]


def _results() -> Results:
    path = BUILD_DIR / "engine_builds.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def table(results: Results) -> str:
    builds = sorted({build for found in results.values() for build in found})
    rows = [("check", *builds), ("---",) * (len(builds) + 1)]
    for check in (check.name for check in CHECKS if check.name in results):
        said = (results[check].get(build, {}) for build in builds)
        cells = (
            f"{'' if found['is_right'] else '**deviates:** '}{found['said']}" if found else "–"
            for found in said
        )
        rows.append((check, *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
