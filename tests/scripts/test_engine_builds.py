"""A build takes the place of the packaged engine; the table shows the result of each check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.engine_program import engine_program

from scripts import engine_builds

ROOT = Path(__file__).parent.parent.parent


def test_programs_find_the_build_in_place_of_the_package(tmp_path: Path) -> None:
    program = tmp_path / "built" / "llama-server"
    program.parent.mkdir()
    program.write_bytes(engine_program(11434))
    program.chmod(0o755)
    copy = engine_builds.stand_in(str(program), tmp_path / "place")
    paths = [str(tmp_path / "place"), str(ROOT)]
    directories = {
        f"CORRAL_{name}_DIR": str(tmp_path / name.lower())
        for name in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME")
    }
    done = subprocess.run(
        [sys.executable, "-m", "supervisor.cli", "engine", "path"],
        env={**os.environ, **directories, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(copy)


def test_the_table_has_a_column_for_each_build() -> None:
    right = {"is_right": True, "said": "12 passed"}
    wrong = {"is_right": False, "said": "1 failed, 11 passed"}
    table = engine_builds.table(
        {"tests": {"b11434": wrong, "b10434": right}, "kinds": {"b10434": right}}
    )
    assert table.splitlines() == [
        "| check | b10434 | b11434 |",
        "| --- | --- | --- |",
        "| tests | 12 passed | **deviates:** 1 failed, 11 passed |",
        "| kinds | 12 passed | – |",
    ]


def test_a_check_says_its_last_lines() -> None:
    said = {check.name: check for check in engine_builds.CHECKS}
    assert said["tests"].read("..F [ 9%]\n1 failed, 2 passed in 3.45s\n") == "1 failed, 2 passed"
    log = "   8 MiB: turns 1.000\n  32 MiB: turns 0.997\n 256 MiB: turns 0.989\n"
    assert said["host_cache_check"].read(log).count(";") == 2
