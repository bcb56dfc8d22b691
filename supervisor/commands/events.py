"""`corral events`: the daemon's events as they happen."""

from __future__ import annotations

from datetime import datetime

from supervisor.control.client import Client
from supervisor.events import describe
from supervisor.host.paths import directories
from supervisor.output import CommandResult, to_json, write


def events(*, as_json: bool) -> CommandResult:
    """Print each event until Ctrl-C, or until the daemon stops; as JSON, one object a line."""
    for message in Client(directories().control_socket).events():
        if event := message.get("event"):
            at = datetime.fromisoformat(event["at"])
            text = describe(event["name"], event["level"], at, event["fields"])
            write(to_json(event) if as_json else text)
    return CommandResult(None)
