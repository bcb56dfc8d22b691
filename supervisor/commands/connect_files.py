"""Settings files of clients: read, backed up, written, and taken back.

What is written is remembered first, in files under `connect/` of the data directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from supervisor.connect.client import FileSettings
from supervisor.connect.journal import (
    FileEntries,
    applied,
    is_empty,
    read_json,
    to_json,
    undone,
)
from supervisor.connect.place import Place
from supervisor.errors import AccessDenied, CorralError, SettingsInvalid
from supervisor.host.files import back_up, open_regular, rewrite, write_atomic
from supervisor.host.paths import make_private

_FILE_MAX_BYTES: Final = 4 * 1024**2
_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written; `backup` is None where there was none before."""

    path: Path
    backup: Path | None


@dataclass(frozen=True, slots=True)
class Restored:
    """A file without what was written; `left` are values that were changed since."""

    path: Path
    left: tuple[Place, ...]
    is_removed: bool


class SettingsFiles:
    """All methods raise AccessDenied and SettingsInvalid; then no file was changed."""

    def __init__(self, data: Path) -> None:
        self._journals = data / "connect"

    def is_connected(self, client: str) -> bool:
        return self._journal(client).exists()

    def write(self, client: str, wanted: Sequence[FileSettings]) -> list[Written]:
        """Write settings, with a backup of each file that is there."""
        wanted = [replace(one, path=Path(os.path.realpath(one.path))) for one in wanted]
        earlier = {one.path: one for one in self._read(client)}
        made = [_applied(one, earlier.get(one.path)) for one in wanted]
        others = [one for path, one in earlier.items() if path not in {two.path for two in wanted}]
        with _reported(self._journals):
            make_private(self._journals.parent)
            make_private(self._journals)
            entries = [*(one for _, one in made), *others]
            write_atomic(self._journal(client), json.dumps(to_json(entries)))
        return [_written(entries.path, text) for text, entries in made]

    def undo(self, client: str) -> list[Restored]:
        """Take back what was written; raises CorralError where nothing was."""
        written = self._read(client)
        if not written:
            raise CorralError(
                f"corral connect {client} --write has written nothing that is still there",
                hint="corral connect shows which clients are connected",
            )
        texts = [(one, _text(one.path)) for one in written]
        found = [(one, _reworded(one.path, undone, text, one)) for one, text in texts if text]
        restored = []
        for one, result in found:
            is_removed = one.is_new and is_empty(result.text)
            with _reported(one.path):
                if is_removed:
                    one.path.unlink(missing_ok=True)
                else:
                    rewrite(one.path, result.text)
            restored.append(Restored(one.path, result.left, is_removed))
        with _reported(self._journals):
            self._journal(client).unlink()
        return restored

    def _journal(self, client: str) -> Path:
        return self._journals / f"{client}.json"

    def _read(self, client: str) -> list[FileEntries]:
        path = self._journal(client)
        if (text := _text(path)) is None:
            return []
        try:
            return read_json(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SettingsInvalid(
                f"{path} cannot be read: {error!r}",
                hint="restore the client's settings from their backup, then delete it",
            ) from error


def _applied(wanted: FileSettings, earlier: FileEntries | None) -> tuple[str, FileEntries]:
    text = _text(wanted.path)

    def apply(text: str, wanted: FileSettings) -> tuple[str, FileEntries]:
        return applied(text, wanted, earlier, is_new=is_new)

    is_new = text is None
    return _reworded(wanted.path, apply, text or "", wanted)


def _reworded(
    path: Path, change: Callable[[str, _Given], _Result], text: str, given: _Given
) -> _Result:
    """Call a change of a file's text; raises SettingsInvalid where it has another format."""
    try:
        return change(text, given)
    except (ValueError, TypeError, LookupError) as error:
        raise SettingsInvalid(
            f"{path} cannot be changed safely: {error}", hint="correct it, then try again"
        ) from error


def _text(path: Path) -> str | None:
    """Return the text of a file, None where there is none."""
    with _reported(path):
        try:
            with open_regular(path) as file:
                content = file.read(_FILE_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
    if len(content) > _FILE_MAX_BYTES:
        raise SettingsInvalid(f"{path} is larger than {_FILE_MAX_BYTES} bytes", hint="shorten it")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsInvalid(f"{path} is no UTF-8", hint="correct it, then try again") from error


def _written(path: Path, text: str) -> Written:
    with _reported(path):
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, text)
            return Written(path, None)
        backup = back_up(path)
        rewrite(path, text)
        return Written(path, backup)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AccessDenied(
            f"cannot change {error.filename or path}: {error.strerror or error}",
            hint="make it yours and writable, then try again",
        ) from error
