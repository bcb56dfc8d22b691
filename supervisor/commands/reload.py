"""`corral reload`: apply changed settings, and show what changed."""

from __future__ import annotations

from supervisor.control.client import Client
from supervisor.control.messages import ErrorFields, ReloadReport
from supervisor.control.running import last_message
from supervisor.host.paths import directories
from supervisor.output import CommandResult, colored


def reload(*, dry_run: bool) -> CommandResult:
    """Reload the daemon's settings; exit code 1 if a changed model did not start."""
    report = last_message(Client(directories().control_socket).reload(dry_run=dry_run))["reloaded"]
    text = render(report, dry_run=dry_run)
    return CommandResult(report, text, tuple(report["notes"]), 1 if report["failures"] else 0)


def render(report: ReloadReport, *, dry_run: bool) -> str:
    rows = (
        ("would add", "added", report["added"]),
        ("would remove", "removed", report["removed"]),
        ("would replace", "replaced", report["changed"]),
        ("would keep", "kept", report["kept"]),
    )
    lines = [
        f"{would if dry_run else did}: {', '.join(names)}" for would, did, names in rows if names
    ]
    failures = [line for failure in report["failures"] for line in _explain(failure)]
    return "\n".join([*lines, *failures])


def _explain(failure: ErrorFields) -> list[str]:
    lines = [f"{colored('failed', 'red')}: {failure['message']}"]
    return lines + [f"  {label}: {failure[label]}" for label in ("hint", "log") if failure[label]]
