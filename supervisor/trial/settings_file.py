"""Changes `corral.toml` for a trial that is over, and keeps its comments.

The result is read again: where it does not say what it should, nothing is changed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.host.files import write_atomic

Table = MutableMapping[str, Any]


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
            _write(self.path, self.before)
            self.backup.unlink(missing_ok=True)


def change(path: Path, model: str, *, is_applied: bool) -> ChangedFile:
    """Change a settings file as `without_trial`, with a backup beside it.

    Raises:
        SettingsInvalid: As `without_trial`.
        AccessDenied: It cannot be read or written.
    """
    with _reported(path):
        text = path.read_text("utf-8")
        edit = without_trial(text, model, is_applied=is_applied)
        backup = path.with_name(f"{path.name}.{datetime.now().astimezone():%Y%m%d-%H%M%S}.bak")
        write_atomic(backup, text)
        _write(path, edit.text)
    return ChangedFile(path, text, edit.lines, backup)


def _write(path: Path, text: str) -> None:
    mode = path.stat().st_mode
    write_atomic(path, text)
    path.chmod(mode)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AccessDenied(
            f"{path} cannot be changed: {error.strerror or error}",
            hint="change it as its owner, then run corral reload",
        ) from error


def without_trial(text: str, model: str, *, is_applied: bool) -> Edit:
    """Remove a model's trial; its profile and flags become the model's own if `is_applied`.

    Raises:
        SettingsInvalid: The file does not have the trial, or cannot be changed safely.
    """
    try:
        document = tomlkit.parse(text)
        wanted = tomllib.loads(text)
        trial = dict(wanted["models"][model]["trial"])
        for whole, is_kept in ((document, True), (wanted, False)):
            _change(whole, model, is_applied=is_applied, is_kept=is_kept)
        after = tomlkit.dumps(document)
        is_right = tomllib.loads(after) == wanted
    except (TOMLKitError, tomllib.TOMLDecodeError, LookupError, TypeError, ValueError) as error:
        raise _by_hand(model, text, is_applied=is_applied) from error
    if not is_right:
        raise _by_hand(model, text, is_applied=is_applied)
    own = _own_lines(trial) if is_applied else []
    return Edit(
        after, (*(f"models.{model}.{line}" for line in own), f"models.{model}.trial is gone")
    )


def _change(whole: Table, model: str, *, is_applied: bool, is_kept: bool) -> None:
    table = whole["models"][model]
    trial = dict(table["trial"])
    del table["trial"]
    if not is_applied:
        return
    if "profile" in trial:
        table["profile"] = str(trial["profile"])
    if flags := trial.get("flags"):
        if "flags" not in table:
            table["flags"] = tomlkit.inline_table() if is_kept else {}
        for name, value in flags.items():
            table["flags"][name] = value


def _own_lines(trial: Mapping[str, Any]) -> list[str]:
    """Return what the model's own table says once its trial is applied."""
    profile = [f"profile = {_toml(trial['profile'])}"] if "profile" in trial else []
    flags = trial.get("flags", {}).items()
    return [*profile, *(f"flags.{name} = {_toml(value)}" for name, value in flags)]


def _toml(value: object) -> str:
    return tomlkit.item(value).as_string()


def _by_hand(model: str, text: str, *, is_applied: bool) -> SettingsInvalid:
    """Return an error with what a person is to change."""
    hint = f"remove [models.{model}.trial] from it, then run corral reload"
    if is_applied:
        try:
            trial = tomllib.loads(text)["models"][model]["trial"]
        except (tomllib.TOMLDecodeError, LookupError, TypeError):
            return SettingsInvalid(
                f"the settings file has no [models.{model}.trial]",
                hint="a trial of CORRAL_MODELS__… variables ends where they are set",
            )
        hint = f"write {' and '.join(_own_lines(trial))} into [models.{model}], {hint}"
    return SettingsInvalid("the settings file cannot be changed safely", hint=hint)
