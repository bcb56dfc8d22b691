"""Loads profiles: named sets of tuned flags in TOML files, independent of any model.

A profile may extend another one and override its flags. The user's directory is searched first, so
a profile there replaces ours of the same name, and may extend it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from supervisor.builds.help import FlagValue, nearest
from supervisor.errors import SettingsInvalid
from supervisor.plan.setting import flag_name, flag_value
from supervisor.system.toml_file import brief, read_toml

_CHAIN_MAX: Final = 32
_NAME_MAX: Final = 128
_KEYS: Final = frozenset({"description", "extends", "flags"})


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile with inherited flags; `origins` names the profile that sets each flag."""

    name: str
    path: Path
    description: str
    extends: str | None
    flags: Mapping[str, FlagValue]
    origins: Mapping[str, str]


def load(name: str, dirs: Sequence[Path], above: tuple[Path, ...] = ()) -> Profile:
    """Load a profile with inherited flags, from the first of `dirs` that has it.

    `above` are the profiles that extend it.
    """
    if len(above) > _CHAIN_MAX:
        raise SettingsInvalid(f"{above[0]} extends a chain of more than {_CHAIN_MAX} profiles")
    path = _find(name, dirs, above)
    table = read_toml(path)
    check(path, table)

    extends = table.get("extends")
    under = load(extends, dirs, (*above, path)) if extends else None
    own: dict[str, FlagValue] = table.get("flags", {})
    return Profile(
        name=name,
        path=path,
        description=table.get("description", ""),
        extends=extends,
        flags={**(under.flags if under else {}), **own},
        origins={**(under.origins if under else {}), **dict.fromkeys(own, name)},
    )


def overlay_flags(under: Profile, flags: Mapping[str, FlagValue], name: str) -> Profile:
    """Add the flags of a profile; they come last, to override an older spelling too."""
    kept = {key: value for key, value in under.flags.items() if key not in flags}
    return replace(
        under, flags={**kept, **flags}, origins={**under.origins, **dict.fromkeys(flags, name)}
    )


def names(dirs: Sequence[Path]) -> tuple[str, ...]:
    return tuple(sorted({path.stem for directory in dirs for path in directory.glob("*.toml")}))


def _find(name: str, dirs: Sequence[Path], above: tuple[Path, ...]) -> Path:
    """Find the first file of this name that is not in `above`, the profiles that extend it."""
    found = list(_files(name, dirs))
    for path in found:
        if path not in above:
            return path
    if found:
        chain = " extends ".join([*(path.stem for path in above), name])
        raise SettingsInvalid(f"a profile cannot extend itself: {chain}")
    known = names(dirs)
    near = nearest(name, known)
    raise SettingsInvalid(
        f"profile {brief(name)} not found" + (f"; did you mean {near}?" if near else ""),
        hint=f"available profiles: {', '.join(known)}",
    )


def _files(name: str, dirs: Sequence[Path]) -> Iterator[Path]:
    if Path(name).name != name or len(name) > _NAME_MAX or "\0" in name:
        return
    for directory in dirs:
        path = directory / f"{name}.toml"
        if path.is_file():
            yield path


def check(path: Path, table: Mapping[str, Any], known: Collection[str] = _KEYS) -> None:
    """Check the content of a profile's file; raises SettingsInvalid."""
    for key in table.keys() - set(known):
        near = nearest(key, known)
        hint = f"did you mean {near}?" if near else f"known keys: {', '.join(sorted(known))}"
        raise SettingsInvalid(f"{path}: unknown key {key}", hint=hint)
    for key in ("description", "extends"):
        if not isinstance(table.get(key, ""), str):
            raise SettingsInvalid(f"{path}: {key} is not a string")
    _check_flags(path, table.get("flags", {}))


def _check_flags(path: Path, flags: object) -> None:
    if not isinstance(flags, dict):
        raise SettingsInvalid(f"{path}: flags is not a table", hint="write it as [flags]")
    for key, value in flags.items():
        if not isinstance(value, str | int | float | bool):
            raise SettingsInvalid(
                f"{path}: flags.{key} is not a string, number or boolean",
                hint="write a list as one comma-separated string",
            )
        try:
            flag_name(key)
            flag_value(value)
        except ValueError as error:
            raise SettingsInvalid(f"{path}: flags.{brief(key)}: {error}") from error
