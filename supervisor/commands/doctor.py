"""`corral doctor`: problems of this installation, with a fix for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from supervisor.doctor.checks import run_checks
from supervisor.doctor.finding import Finding
from supervisor.host.paths import directories
from supervisor.output import CommandResult, colored

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(config: Path | None) -> CommandResult:
    """Check everything that serving needs; exit code 1 if something will not work."""
    found = run_checks(config, directories())
    counts = {level: sum(one.level == level for one in found) for level in _STYLES}
    data = {"findings": [asdict(one) for one in found], **counts}
    return CommandResult(data, render(found), exit_code=1 if counts["fail"] else 0)


def render(found: Sequence[Finding]) -> str:
    width = max(len(one.name) for one in found)
    return "\n".join([*(_line(one, width) for one in found), "", _verdict(found)])


def _line(one: Finding, width: int) -> str:
    indent = "\n" + " " * (width + 7)
    level = colored(f"{one.level:4}", _STYLES[one.level])
    fix = f"{indent}{colored('fix:', 'dim')} {one.fix}" if one.fix else ""
    text = one.text.replace("\n", indent)
    return f"{level}  {one.name:{width}} {text}{fix}"


def _verdict(found: Sequence[Finding]) -> str:
    failures = [one.name for one in found if one.level == "fail"]
    if failures:
        return f"will not work: {', '.join(failures)}"
    warnings = sum(one.level == "warn" for one in found)
    return f"works; {warnings} could be better" if warnings else "all is well"
