"""`corral record show|forget`: what is recorded of requests."""

from __future__ import annotations

from supervisor.errors import SettingsInvalid
from supervisor.host.paths import directories
from supervisor.output import CommandResult, table
from supervisor.request_record.files import RecordFiles


def show() -> CommandResult:
    """Show how much is recorded of each model, and where; works without a daemon."""
    root = directories().request_record
    counts = RecordFiles(root).counts()
    rows = [(model, str(count)) for model, count in counts.items()]
    text = f"{table(('MODEL', 'REQUESTS'), rows)}\n\n{root}" if rows else "no recorded requests"
    data = {"path": str(root), "models": counts}
    return CommandResult(data, text)


def forget(model: str | None, *, everything: bool) -> CommandResult:
    """Delete what is recorded of a model, or of all; works without a daemon."""
    if (model is None) is not everything:
        raise SettingsInvalid("name a model, or give --all", hint="corral record show lists them")
    counts = RecordFiles(directories().request_record).forget(model)
    return CommandResult(counts, f"deleted: figures of {sum(counts.values())} requests")
