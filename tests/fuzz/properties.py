"""Runs the suite's property tests with random examples; the suite has the same ones each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from fuzz.finding import Example, Findings, Limits, Report

_ROOT: Final = Path(__file__).parents[2]
_LIMIT_S: Final = 600
_QUIET: Final = ("-q", "-p", "no:cacheprovider", "-m", "hypothesis")


def run(seed: int, limits: Limits, findings: Findings, home: Path, root: Path = _ROOT) -> Report:
    """Run one property after the other, each input with a seed of its own, from the first again."""
    listed = _pytest(root, "--collect-only").stdout
    names = [line for line in listed.splitlines() if "::" in line]
    while names and (number := limits.take()) is not None:
        name = names[number % len(names)]
        at_random = ("--hypothesis-profile=search", f"--hypothesis-seed={seed + number}")
        try:
            ran = _pytest(root, *at_random, f"--basetemp={home / 'tests'}", name)
        except subprocess.TimeoutExpired:
            findings.add("properties", f"{name} takes over {_LIMIT_S} s", f"input {number}")
            continue
        if ran.returncode:
            output = Example("output.txt", ran.stdout.encode(errors="replace"), name)
            findings.add("properties", f"{name} fails", f"input {number}: {ran.stdout}", [output])
    return Report("properties", limits.taken, {"properties": str(len(names))})


def _pytest(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *_QUIET, *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
