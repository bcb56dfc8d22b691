"""`corral warm`: have a running model read a prompt ahead."""

from __future__ import annotations

from pathlib import Path

from supervisor.commands.slots import last_of
from supervisor.commands.targets import resolve_running
from supervisor.control.client import Client
from supervisor.host.paths import directories
from supervisor.output import CommandResult
from supervisor.warmup.prompts import read


def warm(model: str, file: Path) -> CommandResult:
    """Have every instance of a model read the prompt in a file.

    Raises:
        NotRunning: No daemon runs.
        NoSuchModel: The name is not configured.
        SettingsInvalid: The file is no prompt, or an instance refused it.
        StartFailed: No instance is ready, or one did not come to it.
    """
    prompt = read(file)
    client = Client(directories().control_socket)
    (name,) = resolve_running([model], client.status())
    warmed = last_of(client.warm(name, dict(prompt.body)))["warmed"]
    lines = [
        f"{one['instance']}: {one['tokens']} tokens read, {one['cached']} known already"
        for one in warmed
    ]
    return CommandResult(warmed, "\n".join(lines))
