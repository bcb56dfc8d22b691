"""Writes `profiles.d/MODEL.toml`, keeps what it replaces, and brings it back.

The file is replaced as a whole. What stood there stays beside it as `MODEL.toml.1`, `.2` and so on,
the newest with the highest number.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.flags.tuned import path_of
from supervisor.host.files import write_atomic
from supervisor.host.toml_file import read_toml

_BACKUPS_MAX: Final = 10
_NUMBER: Final = re.compile(r"\d{1,6}")


@dataclass(frozen=True, slots=True)
class Undone:
    """What undoing did: the backup that was put back, or None if the file was removed."""

    path: Path
    restored: Path | None


def write(model: str, directory: Path, text: str) -> tuple[Path, Path | None]:
    """Write a profile; return its path, and that of the copy of what it replaced.

    Raises:
        AccessDenied: Nothing was changed.
    """
    path = path_of(model, directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        backup = _back_up(path)
        write_atomic(path, text)
    except OSError as error:
        raise AccessDenied(f"cannot write {path}: {error.strerror}") from error
    return path, backup


def undo(model: str, directory: Path) -> Undone:
    """Put back what the newest profile replaced, or remove it.

    Raises:
        SettingsInvalid: There is none, or it was not written by `corral tune`.
        AccessDenied: Nothing was changed.
    """
    path = path_of(model, directory)
    backups = _backups(path)
    try:
        if backups:
            backups[-1].replace(path)
            return Undone(path, backups[-1])
        _check_ours(model, path)
        path.unlink()
    except OSError as error:
        raise AccessDenied(f"cannot change {path}: {error.strerror}") from error
    return Undone(path, None)


def _check_ours(model: str, path: Path) -> None:
    if not os.path.lexists(path):
        raise SettingsInvalid(
            f"there is nothing to undo: {model} has no tuned profile",
            hint=f"corral tune {model} makes one",
        )
    try:
        is_ours = "tuned" in read_toml(path)
    except SettingsInvalid:
        is_ours = True  # a broken file applies no flags
    if not is_ours:
        raise SettingsInvalid(
            f"{path} was not written by corral tune: it has no table [tuned]",
            hint=f"remove it by hand: rm {path}",
        )


def _back_up(path: Path) -> Path | None:
    """Keep the present file under another name; nothing else of that name is replaced."""
    if not os.path.lexists(path):
        return None
    backups = _backups(path)
    number = int(backups[-1].suffix[1:]) + 1 if backups else 1
    backup = path.with_name(f"{path.name}.{number}")
    os.link(path, backup, follow_symlinks=False)
    for old in backups[: max(0, len(backups) + 1 - _BACKUPS_MAX)]:
        old.unlink(missing_ok=True)
    return backup


def _backups(path: Path) -> list[Path]:
    """The copies beside a file, the oldest first."""
    found = [one for one in path.parent.glob("*") if one.stem == path.name]
    numbered = [one for one in found if _NUMBER.fullmatch(one.suffix[1:])]
    return sorted(numbered, key=lambda one: int(one.suffix[1:]))
