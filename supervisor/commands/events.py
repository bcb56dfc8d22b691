"""`corral events`: what happens, as it happens."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from supervisor.control.client import Client
from supervisor.control.messages import EventLine
from supervisor.host.paths import directories
from supervisor.log import words
from supervisor.output import CommandResult, colored, to_json, write

_STYLES: Final = {"info": "dim", "warning": "yellow", "error": "red"}


def events(*, as_json: bool) -> CommandResult:
    """Print each event of the daemon until Ctrl-C, or until the daemon has ended.

    Args:
        as_json: Print each event as one line of JSON: `name`, `level`, `at`, `fields`.

    Raises:
        NotRunning, DaemonBusy: There is no daemon to listen to.
    """
    render = to_json if as_json else describe
    for line in Client(directories().control_socket).events():
        if "event" in line:
            write(render(line["event"]))
    return CommandResult(None)


def describe(event: EventLine) -> str:
    """Return an event as a person reads it: local time, name, and the fields that are known."""
    at = datetime.fromisoformat(event["at"]).astimezone()
    name = colored(f"{event['name']:19}", _STYLES[event["level"]])
    return f"{at:%H:%M:%S}.{at.microsecond // 1000:03} {name} {words(event['fields'])}".rstrip()
