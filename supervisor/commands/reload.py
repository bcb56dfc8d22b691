"""`corral reload`: take new settings in, and show what they change."""

from __future__ import annotations

from typing import Final

from supervisor.commands.start import last_of
from supervisor.control.client import Client
from supervisor.control.messages import ErrorFields, ReloadReport
from supervisor.host.paths import directories
from supervisor.output import CommandResult, colored

_FAILED: Final = 1


def reload(*, dry_run: bool) -> CommandResult:
    """Have the daemon read its settings again; exit code 1 when something did not come up.

    Raises:
        NotRunning: No daemon runs.
        CorralError: The settings cannot be used; nothing was changed.
    """
    report = last_of(Client(directories().control_socket).reload(dry_run=dry_run))["reloaded"]
    exit_code = _FAILED if report["failures"] else 0
    return CommandResult(report, render(report, dry_run=dry_run), tuple(report["notes"]), exit_code)


def render(report: ReloadReport, *, dry_run: bool) -> str:
    """Return what a reload did, or would do, as a person reads it."""
    rows = (
        ("would add", "added", report["added"]),
        ("would remove", "removed", report["removed"]),
        ("would replace", "replaced", report["changed"]),
        ("would keep", "kept", report["kept"]),
    )
    lines = [
        f"{would if dry_run else did}: {', '.join(places)}" for would, did, places in rows if places
    ]
    failures = [line for failure in report["failures"] for line in _explain(failure)]
    return "\n".join([*lines, *failures])


def _explain(failure: ErrorFields) -> list[str]:
    lines = [f"{colored('failed', 'red')}: {failure['message']}"]
    return lines + [f"  {label}: {failure[label]}" for label in ("hint", "log") if failure[label]]
