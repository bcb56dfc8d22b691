"""`corral warm`: prefill a prompt on a running model."""

from __future__ import annotations

from pathlib import Path

from supervisor.control.client import Client
from supervisor.control.running import last_message, resolve_running
from supervisor.host.paths import directories
from supervisor.output import CommandResult
from supervisor.warmup.prompts import read


def warm(model: str, file: Path) -> CommandResult:
    prompt = read(file)
    client = Client(directories().control_socket)
    (name,) = resolve_running([model], client.status())
    warmed = last_message(client.warm(name, dict(prompt.body)))["warmed"]
    lines = [
        f"{one['instance']}: {one['tokens']} tokens prefilled, {one['cached']} already cached"
        for one in warmed
    ]
    return CommandResult(warmed, "\n".join(lines))
