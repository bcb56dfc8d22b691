"""Takes a trial that is over out of `corral.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from typing import Final

import tomlkit

from supervisor.errors import SettingsInvalid
from supervisor.settings.edit import Edit, Table, edited, toml

# What a trial says as the model's own table does.
_OWN: Final = ("profile", "engine")


def without_trial(text: str, model: str, *, is_applied: bool) -> Edit:
    """Remove a model's trial; its profile and flags become the model's own if `is_applied`.

    Raises:
        SettingsInvalid: The file does not have the trial, or cannot be changed safely.
    """
    try:
        after = edited(text, functools.partial(_change, model=model, is_applied=is_applied))
        trial = dict(tomllib.loads(text)["models"][model]["trial"])
    except (SettingsInvalid, LookupError, TypeError) as error:
        raise _by_hand(model, text, is_applied=is_applied) from error
    own = _own_lines(trial) if is_applied else []
    return Edit(
        after, (*(f"models.{model}.{line}" for line in own), f"models.{model}.trial is gone")
    )


def _change(whole: Table, model: str, *, is_applied: bool) -> None:
    table = whole["models"][model]
    trial = dict(table["trial"])
    del table["trial"]
    if not is_applied:
        return
    for name in _OWN:
        if name in trial:
            table[name] = str(trial[name])
    if flags := trial.get("flags"):
        if "flags" not in table:
            table["flags"] = tomlkit.inline_table()
        for name, value in flags.items():
            table["flags"][name] = value


def _own_lines(trial: Mapping[str, object]) -> list[str]:
    """Return what the model's own table says once its trial is applied."""
    own = [f"{name} = {toml(trial[name])}" for name in _OWN if name in trial]
    flags = trial.get("flags")
    named = flags.items() if isinstance(flags, Mapping) else ()
    return [*own, *(f"flags.{name} = {toml(value)}" for name, value in named)]


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
