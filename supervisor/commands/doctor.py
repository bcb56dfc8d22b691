"""`corral doctor`: what is wrong here, and what to do about it."""

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
    """Look at everything that serving needs; exit code 1 when something will not work."""
    found = run_checks(config, directories())
    counts = {level: sum(one.level == level for one in found) for level in _STYLES}
    data = {"findings": [asdict(one) for one in found], **counts}
    return CommandResult(data, render(found), exit_code=1 if counts["fail"] else 0)


def render(found: Sequence[Finding]) -> str:
    """Return the findings as a person reads them, each with its mark, and the verdict."""
    width = max(len(one.name) for one in found)
    lines = [line for one in found for line in _lines(one, width)]
    return "\n".join([*lines, "", _verdict(found)])


def _lines(one: Finding, width: int) -> list[str]:
    mark = colored(f"{one.level:4}", _STYLES[one.level])
    indent = "\n" + " " * (width + 7)
    text = one.text.replace("\n", indent)
    cure = [f"{'':{width + 7}}{colored('cure:', 'dim')} {one.fix}"] if one.fix else []
    return [f"{mark}  {one.name:{width}} {text}", *cure]


def _verdict(found: Sequence[Finding]) -> str:
    bad = [one.name for one in found if one.level == "fail"]
    if bad:
        return f"will not work: {', '.join(bad)}"
    poor = sum(one.level == "warn" for one in found)
    return f"works; {poor} could be better" if poor else "all is well"
