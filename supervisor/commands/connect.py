"""`corral connect`: settings of client programs for the running daemon."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from supervisor.commands.connect_facts import check, daemon_facts
from supervisor.commands.connect_files import SettingsFiles
from supervisor.connect.client import Client, FileSettings
from supervisor.connect.clients import CLIENTS
from supervisor.connect.facts import Places
from supervisor.connect.shown import notes_of, text_of
from supervisor.errors import CorralError
from supervisor.host.paths import directories
from supervisor.output import CommandResult, table


def list_clients() -> CommandResult:
    """List the clients, those found on this machine first."""
    places, files = _places(), SettingsFiles(directories().data)
    rows = [_row(client, places, files) for client in CLIENTS]
    rows.sort(key=lambda row: (not row["connected"], not row["found"]))
    cells = [
        (
            str(row["name"]),
            str(row["title"]),
            "yes" if row["found"] else "-",
            "yes" if row["connected"] else "-",
        )
        for row in rows
    ]
    text = table(("CLIENT", "PROGRAM", "FOUND", "CONNECTED"), cells)
    return CommandResult(rows, text, ("corral connect CLIENT shows its settings",))


def show(name: str, model: str | None, small: str | None) -> CommandResult:
    """Show the settings of a client; writes nothing."""
    client = _client(name)
    facts = daemon_facts(model, small)
    settings = client.files(facts, _places())
    text = "\n\n".join(f"# {one.path}\n{text_of(one)}".rstrip() for one in settings)
    data = {"client": name, "files": [_data(one) for one in settings]}
    notes = (*notes_of(client, facts), f"corral connect {name} --write writes them")
    return CommandResult(data, text, notes)


def write(name: str, model: str | None, small: str | None, *, checks: bool) -> CommandResult:
    """Send a request as the client does, then write its settings.

    Raises:
        CorralError: The request failed, or a file cannot be changed: nothing is written.
    """
    client = _client(name)
    facts = daemon_facts(model, small)
    if checks:
        check(facts, client.api)
        facts = daemon_facts(model, small)  # its context is known now
    written = SettingsFiles(directories().data).write(name, client.files(facts, _places()))
    lines = [f"wrote {one.path}" for one in written]
    lines += [f"{facts.model.name} answers at {facts.url}{client.api.value}"] if checks else []
    backups = [f"{one.backup} has what was there before" for one in written if one.backup]
    data = {
        "client": name,
        "model": facts.model.name,
        "small": facts.small.name,
        "files": [str(one.path) for one in written],
        "backups": [str(one.backup) for one in written if one.backup],
        "is_checked": checks,
    }
    notes = (*backups, *notes_of(client, facts), f"start it: {client.run(facts)}")
    return CommandResult(data, "\n".join(lines), notes)


def undo(name: str) -> CommandResult:
    """Take back what `write` wrote; what was changed since stays."""
    client = _client(name)
    undone = SettingsFiles(directories().data).undo(client.name)
    lines = [f"removed {one.path}" if one.is_removed else f"restored {one.path}" for one in undone]
    left = [(one.path, ".".join(map(str, place))) for one in undone for place in one.left]
    notes = tuple(f"{path}: {place} was changed since, and stays" for path, place in left)
    data = {
        "client": name,
        "files": [str(one.path) for one in undone],
        "left": [[str(path), place] for path, place in left],
    }
    return CommandResult(data, "\n".join(lines) or "none of its files is there any more", notes)


def client_names() -> list[str]:
    return [client.name for client in CLIENTS]


def _client(name: str) -> Client:
    for client in CLIENTS:
        if client.name == name:
            return client
    known = ", ".join(client_names())
    raise CorralError(f"no client is named {name!r}", hint=f"clients: {known}")


def _places() -> Places:
    return Places(Path.home(), dict(os.environ), directories().config)


def _row(client: Client, places: Places, files: SettingsFiles) -> dict[str, object]:
    is_installed = any(shutil.which(program) for program in client.programs)
    directory = client.directory(places)
    is_own = directory not in {places.home, places.corral}
    return {
        "name": client.name,
        "title": client.title,
        "found": is_installed or (is_own and directory.is_dir()),
        "connected": files.is_connected(client.name),
    }


def _data(settings: FileSettings) -> dict[str, object]:
    return {"path": str(settings.path), "content": text_of(replace(settings))}
