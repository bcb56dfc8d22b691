"""`corral slots new-key`: the file of keys that encrypt saved conversations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from supervisor.errors import AccessDenied
from supervisor.host.files import write_atomic
from supervisor.host.paths import directories
from supervisor.output import CommandResult
from supervisor.settings.load import load
from supervisor.slot_store.key_ring import new_key, parse_key_ring, read_key_ring, with_newest

_FILE_NAME: Final = "slots.key"


def new(file: Path | None, config: Path | None) -> CommandResult:
    """Make a file with a random key, or put one before those that a file has; show no key."""
    used = load(config, config_dir=directories().config).settings.supervisor.slots_key_file
    path = file or used or directories().config / _FILE_NAME
    older = 0
    text = ""
    if os.path.lexists(path):
        older = len(read_key_ring(path).by_id)
        text = path.read_text("ascii")
    key = new_key()
    _write(path, with_newest(key, text))
    data = {"path": str(path), "key_id": key.id, "older_keys": older}
    shown = f"{path} has a new key, {key.id}"
    return CommandResult(data, shown, tuple(_notes(path, older, is_used=path == used)))


def _write(path: Path, text: str) -> None:
    parse_key_ring(text.encode(), path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise AccessDenied(f"cannot write {path}: {error.strerror}") from error


def _notes(path: Path, older: int, *, is_used: bool) -> Iterator[str]:
    if not is_used:
        yield f'nothing is encrypted until [supervisor] has: slots_key_file = "{path}"'
    else:
        yield "a running daemon encrypts with it after corral reload"
    if older:
        yield f"its older keys, {older}, still decrypt what was saved with them"
    yield "without its key, a saved conversation is computed again"
