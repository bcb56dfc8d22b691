"""One part of the comparison cannot lose the others."""

import os
from pathlib import Path

import psutil
import pytest
from support.corral_cli import until

from scripts.bench.all import outcome
from scripts.bench.parts import PARTS, Part
from scripts.bench.result import Result, one_round, read

ROOT = Path(__file__).parent.parent.parent


def part(directory: Path, script: str, limit_s: float = 30) -> Part:
    path = directory / "script"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return Part("Part", str(path), "About.", quick_s=limit_s, full_s=limit_s)


def test_a_result_is_read_back(tmp_path: Path) -> None:
    found = Result([one_round("loads", "", {"a": 3})], {"goal": False}, {"nginx": "not installed"})
    found.write(tmp_path / "result.json")
    assert read(tmp_path / "result.json").figures == found.figures
    copy = part(tmp_path, f'cp {tmp_path}/result.json "$2"; exit 1')
    done = outcome(copy, 60, is_quick=True)
    assert done.problem is None
    assert done.result == read(tmp_path / "result.json")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo one; echo no engine >&2; exit 3", "exit code 3: one / no engine"),
        ("exit 0", "it wrote no result"),
        ('echo "{" > "$2"', "it wrote no result"),
    ],
)
def test_a_part_that_fails_is_named_with_its_error(
    tmp_path: Path, script: str, problem: str
) -> None:
    done = outcome(part(tmp_path, script), 60, is_quick=True)
    assert (done.result, done.problem) == (None, problem)


def test_a_part_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    script = f"trap 'exit 130' INT; setsid sleep 600 & echo $! > {tmp_path}/pid; wait"
    done = outcome(part(tmp_path, script, limit_s=0.5), 60, is_quick=True)
    assert done.problem == "it took longer than 0 s"
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_no_part_begins_without_time(tmp_path: Path) -> None:
    done = outcome(part(tmp_path, "touch began"), 0, is_quick=True)
    assert done.problem == "no time was left for it"


def test_every_part_has_its_script() -> None:
    for part in PARTS:
        assert os.access(ROOT / part.script, os.X_OK), part.script
