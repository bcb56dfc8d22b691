"""Reads tuned profiles, `profiles.d/MODEL.toml`, which `corral tune` writes for each model.

A tuned profile overrides the model's profile, and the model's own flags override it. It is not used
with another machine or another profile than it was measured on. With another engine, device or
model file it is used with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.builds.discover import Engine
from supervisor.builds.help import FlagValue
from supervisor.errors import SettingsInvalid
from supervisor.models.metadata import Gguf
from supervisor.plan.profile import check
from supervisor.system import machine as machine_module
from supervisor.system.machine import Machine, cpu_name
from supervisor.system.paths import file_name
from supervisor.system.toml_file import read_toml

_KEYS: Final = frozenset({"description", "extends", "replicas", "flags", "tuned"})
_REPLICAS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Evidence:
    """The conditions and result of the measurement; every text may be empty."""

    goal: str = ""
    date: str = ""
    result: str = ""  # a verdict of comparisons
    machine: str = ""
    engine: str = ""
    devices: str = ""
    model: str = ""  # the fingerprint of its file


@dataclass(frozen=True, slots=True)
class Tuned:
    """The content of a tuned profile."""

    model: str
    path: Path
    extends: str | None  # the profile that it was measured on; None for any
    flags: Mapping[str, FlagValue]
    replicas: int | None
    evidence: Evidence

    @property
    def summary(self) -> str:
        """A clause with the date, the goal and the result."""
        if not self.evidence.date:
            return f"with the flags of {self.path}"
        text = f"tuned on {self.evidence.date} for {self.evidence.goal}"
        return f"{text}: {self.evidence.result}" if self.evidence.result else text


def machine_text(cpu: str, machine: Machine) -> str:
    cores = f"{machine.physical_cores} cores, {machine.logical_cores} threads"
    return f"{cpu}, {cores}"


def machine_here() -> str:
    return machine_text(cpu_name(), machine_module.read())


def conditions(machine: str, engine: Engine, gguf: Gguf) -> Evidence:
    """Return the current conditions, which decide whether a tuned profile still applies."""
    devices = ", ".join(f"{device.name}: {device.description}" for device in engine.devices)
    return Evidence(
        machine=machine, engine=engine.version, devices=devices or "none", model=gguf.fingerprint
    )


def path_of(model: str, directory: Path) -> Path:
    return directory / f"{file_name(model)}.toml"


def read(model: str, directory: Path) -> Tuned | None:
    """Read a tuned profile; None without one. Raises SettingsInvalid: unreadable or invalid."""
    path = path_of(model, directory)
    if not path.is_file():
        return None
    try:
        table = read_toml(path)
        _check(path, table)
    except SettingsInvalid as error:
        hint = f"correct it, or remove it: corral tune {model} --undo"
        raise SettingsInvalid(error.message, hint=hint) from error
    found = table.get("tuned", {})
    return Tuned(
        model=model,
        path=path,
        extends=table.get("extends"),
        flags=table.get("flags", {}),
        replicas=table.get("replicas"),
        evidence=Evidence(**{key: found[key] for key in Evidence.__slots__ if key in found}),
    )


def reason_unused(tuned: Tuned, profile: str, machine: str) -> str | None:
    """Return a clause that says why a tuned profile does not apply, or None."""
    if tuned.extends and tuned.extends != profile:
        return f"it extends the profile {tuned.extends}, and the model has {profile}"
    measured = tuned.evidence.machine
    if measured and measured != machine:
        return f"it was measured on another machine ({measured}; this is {machine})"
    return None


def warnings(tuned: Tuned, profile: str, now: Evidence) -> Iterator[str]:
    """Yield sentences for the user, with the fix after a semicolon."""
    command = f"corral tune {tuned.model}"
    if reason := reason_unused(tuned, profile, now.machine):
        yield f"{tuned.path.name} is not used: {reason}; {command} measures again"
        return
    for what in ("engine", "devices", "model"):
        before, after = getattr(tuned.evidence, what), getattr(now, what)
        if before and before != after:
            shown = "" if what == "model" else f" from {before} to {after}"
            noun = "the model file" if what == "model" else f"the {what}"
            verb = "have" if what == "devices" else "has"
            changed = f"{noun} {verb} changed{shown} since {tuned.path.name} was measured"
            yield f"{changed}; {command} --check measures whether it still helps"


def _check(path: Path, table: Mapping[str, Any]) -> None:
    check(path, table, _KEYS)
    replicas = table.get("replicas", 1)
    if type(replicas) is not int or not 1 <= replicas <= _REPLICAS_MAX:
        raise SettingsInvalid(f"{path}: replicas is not a number from 1 to {_REPLICAS_MAX}")
    found = table.get("tuned", {})
    if not isinstance(found, dict):
        raise SettingsInvalid(f"{path}: tuned is not a table", hint="write it as [tuned]")
    for key in Evidence.__slots__:
        if not isinstance(found.get(key, ""), str):
            raise SettingsInvalid(f"{path}: tuned.{key} is not a string")
