"""Changes `corral.toml` in place: comments, order and layout stay."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomlkit
from tomlkit.exceptions import TOMLKitError

from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.host.files import back_up, rewrite, write_atomic
from supervisor.host.paths import make_private

Table = MutableMapping[str, Any]

_NOT_SAFE: Final = "the settings file cannot be changed safely"
_BY_HAND: Final = "nothing was changed; correct it by hand, with corral config check"


@dataclass(frozen=True, slots=True)
class Edit:
    """The new text, and what it says now, for people."""

    text: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A settings file that was changed, and what it said before; `lines` are for people."""

    path: Path
    before: str
    lines: tuple[str, ...]
    backup: Path

    def restore(self) -> None:
        """Put the file back; raises AccessDenied."""
        with _reported(self.path):
            rewrite(self.path, self.before)
            self.backup.unlink(missing_ok=True)


def change_file(path: Path, edit: Callable[[str], Edit]) -> ChangedFile:
    """Replace the text of a settings file by its edit.

    Raises:
        SettingsInvalid: As `edit` raises it; nothing is changed.
        AccessDenied: The file cannot be read or written.
    """
    with _reported(path):
        text = path.read_text("utf-8")
        made = edit(text)
        backup = back_up(path)
        rewrite(path, made.text)
    return ChangedFile(path, text, made.lines, backup)


def write_file(path: Path, edit: Callable[[str], Edit]) -> Edit:
    """Replace the text of a settings file by its edit, without a backup; make it if there is none.

    Raises:
        SettingsInvalid: As `edit` raises it; nothing is changed.
        AccessDenied: The file cannot be read or written.
    """
    with _reported(path):
        is_new = not path.exists()
        made = edit("" if is_new else path.read_text("utf-8"))
        if is_new:
            make_private(path.parent)
            write_atomic(path, made.text)
        else:
            rewrite(path, made.text)
    return made


def edited(text: str, change: Callable[[Table], None]) -> str:
    """Apply a change to the tables of a TOML text.

    The change is made twice, to the text with its layout and to the plain values. Where the new
    text does not say what the plain values say, it is not used.

    Raises:
        SettingsInvalid: The text is not TOML, or cannot be changed safely.
        LookupError, TypeError: As `change` raises them.
    """
    try:
        document, wanted = tomlkit.parse(text), tomllib.loads(text)
        change(document)
        change(wanted)
        after = tomlkit.dumps(document)
        is_right = tomllib.loads(after) == wanted
    except (TOMLKitError, ValueError) as error:
        raise SettingsInvalid(_NOT_SAFE, hint=_BY_HAND) from error
    if not is_right:
        raise SettingsInvalid(_NOT_SAFE, hint=_BY_HAND)
    return after


def toml(value: object) -> str:
    """Write a value as TOML does."""
    return tomlkit.item(value).as_string()


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AccessDenied(
            f"{path} cannot be changed: {error.strerror or error}",
            hint="change it as its owner, then run corral reload",
        ) from error
