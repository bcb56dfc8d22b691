"""Renders settings as options of the installed build. Pure.

Settings use today's long names without dashes. Names and values that the build spells differently
are translated. An option that the build deprecated without a successor, removed, or never had is
omitted with the reason. A flag of no build, or a value that the build would reject, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.builds.help import (
    Flag,
    Flags,
    FlagValue,
    nearest,
    newest_flags,
    plain_name,
    recorded_names,
)
from supervisor.errors import SettingsInvalid, error_of
from supervisor.plan import setting


@dataclass(frozen=True, slots=True)
class RenderedFlag:
    """An option of a command line; `value` is None for a switch, `note` names a translation."""

    key: str
    flag: str
    value: str | None
    note: str = ""


# The key and the value of a setting that this build does not get, and a clause that says why.
OmittedFlag = tuple[str, FlagValue, str]


_NO_ORIGINS: Final[Mapping[str, str]] = MappingProxyType({})


@contextmanager
def errors_of(origin: str) -> Iterator[None]:
    """Name the profile that a wrong setting is from; an error of a model is shown with its name."""
    try:
        yield
    except SettingsInvalid as error:
        if origin.startswith("profile "):
            raise error_of(origin, error) from error
        raise


def render(
    settings: Mapping[str, FlagValue], flags: Flags, origins: Mapping[str, str] = _NO_ORIGINS
) -> tuple[list[RenderedFlag], list[OmittedFlag]]:
    """Render settings by canonical key for a build; also return the omitted ones.

    Raises SettingsInvalid: no build has a flag, users may not set it, or its value is invalid. The
    message names the origin of the setting if that is a profile.
    """
    results = []
    for key, value in settings.items():
        with errors_of(origins.get(key, "")):
            results.append(_render_setting(key, value, flags))
    lines = [result for result in results if isinstance(result, RenderedFlag)]
    return lines, [result for result in results if not isinstance(result, RenderedFlag)]


def canonical(
    name: str, value: FlagValue, flags: Flags, *, runs_tools: bool = False
) -> tuple[str, FlagValue]:
    """Translate a setting to today's name and value, so that equal settings compare equal.

    The name may be of any build, with or without dashes; `no-x = true` is `x = false`. Raises
    SettingsInvalid: users may not set this option.
    """
    key, value = _positive(plain_name(name), value, flags)
    key = _todays(key)
    if key not in setting.SPELLINGS and (flag := flags.find(key)):
        key = _todays(flag.key)
    key, value = setting.MOVED.get((key, value), (key, value))
    if key == "spec-type":
        words = {old: word for (name, word), old in setting.OLDER_WORDS.items() if name == key}
        value = words.get(value, value)
    if reason := setting.reserved_reason(key, runs_tools=runs_tools):
        raise SettingsInvalid(f"{name} cannot be set: {reason}")
    return key, value


def _positive(key: str, value: FlagValue, flags: Flags) -> tuple[str, FlagValue]:
    """Turn a negative name `no-x` into `x` with the opposite value."""
    if not key.startswith("no-") or not isinstance(value, bool):
        return key, value
    positive = key.removeprefix("no-")
    flag = flags.find(positive)
    # --no-host is not the opposite of --host, which takes a value.
    is_switch = flag is None or flag.kind in {"switch", "unknown"}
    return (positive, not value) if is_switch else (key, value)


def _todays(key: str) -> str:
    return next((new for new, old in setting.SPELLINGS.items() if key in old), key)


def _render_setting(key: str, value: FlagValue, flags: Flags) -> RenderedFlag | OmittedFlag:
    unusable: Flag | None = None
    for name, spelled in _spellings(key, value):
        # An older build may have only the negative form.
        flag = flags.find(name) or flags.find(f"no-{name}")
        if flag and flag.is_usable:
            if rendered := _render_spelling(key, name, spelled, flag, flags):
                return rendered
            reason = f"this build's --{key} does not accept {value}, only {', '.join(flag.choices)}"
            if isinstance(value, bool) or key in setting.ONCE_BARE:
                reason = f"this build has no form of --{key} for its default"
            return key, value, setting.IMPLIED.get((key, value), reason)
        unusable = unusable or flag
    return key, value, setting.IMPLIED.get((key, value)) or _omission_reason(key, unusable)


def _spellings(key: str, value: FlagValue) -> Iterator[tuple[str, FlagValue]]:
    yield key, value
    for older in setting.SPELLINGS.get(key, ()):
        yield older, value
    if moved := setting.MOVED_BACK.get((key, value)):
        yield moved


def _omission_reason(key: str, flag: Flag | None) -> str:
    if flag and flag.removed:
        return f"this build has removed it: {flag.removed}"
    if flag:
        return "this build has deprecated it without a successor"
    if key in recorded_names():
        return f"this build has no --{key}"
    near = nearest(key, recorded_names())
    raise SettingsInvalid(
        f"no llama-server build has the flag {key}",
        hint=f"did you mean {near}?" if near else "corral engine help lists all flags",
    )


def _render_spelling(
    key: str, name: str, spelled: FlagValue, flag: Flag, flags: Flags
) -> RenderedFlag | None:
    """Render a spelling of a setting; None if the build has no form of this value."""
    note = f"this build names --{key} --{name}" if name != key else ""
    value = _translate_value(flag, key, spelled)
    if isinstance(value, bool):
        wanted = name if value else f"no-{name}"
        return RenderedFlag(key, f"--{wanted}", None, note) if flags.find(wanted) else None
    if not _is_known(key, value, flag):
        return None
    dashes = "--" if f"--{name}" in flag.names else "-"
    return RenderedFlag(key, f"{dashes}{name}", _check_word(key, value, flag), note)


def _translate_value(flag: Flag, key: str, value: FlagValue) -> FlagValue:
    """Return the value in this build's words; a bool if the option is a switch in this build."""
    if key in setting.ONCE_BARE and flag.hint is None:
        return value if isinstance(value, bool) else value == "on"
    if isinstance(value, bool) and (key in setting.ONCE_BARE or {"on", "off"} <= set(flag.choices)):
        return "on" if value else "off"
    if isinstance(value, bool) and flag.kind not in {"switch", "unknown"}:
        raise SettingsInvalid(f"{key} needs a value ({flag.hint})", hint=_allowed_values(flag))
    if not isinstance(value, bool) and flag.kind == "switch":
        raise SettingsInvalid(f"{key} takes no value", hint=f"write {key} = true or {key} = false")
    older = setting.OLDER_WORDS.get((key, value))
    return value if older is None or flag.kind == "unknown" or value in flag.choices else older


def _is_known(key: str, value: FlagValue, flag: Flag) -> bool:
    """Return whether the build has a word; False only for words that the newest build has."""
    if flag.kind not in {"enum", "list"} or not flag.choices:
        return True
    newest = newest_flags().find(key)
    words = str(value).split(",") if flag.kind == "list" else [str(value)]
    unknown = [word for word in words if word not in flag.choices]
    return not (unknown and newest and set(unknown) <= set(newest.choices))


def _check_word(key: str, value: FlagValue, flag: Flag) -> str:
    """Return the value as a word of the command line; raises SettingsInvalid."""
    word = str(value)
    if "\0" in word:
        raise SettingsInvalid(f"{key} contains a NUL character")
    if not _is_valid(word, flag):
        raise SettingsInvalid(f"{key} = {value} is invalid", hint=_allowed_values(flag))
    return word


def _is_valid(word: str, flag: Flag) -> bool:
    match flag.kind:
        case "int":
            return word in flag.choices or bool(re.fullmatch(r"-?\d{1,18}", word))
        case "number":
            return word in flag.choices or bool(re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", word))
        case "enum":
            return word in flag.choices
        case "list":
            return not flag.choices or set(word.split(",")) <= set(flag.choices)
        case "switch" | "path" | "string" | "unknown":
            return True


def _allowed_values(flag: Flag) -> str:
    numbers = {"int": ["an integer"], "number": ["a number"]}.get(flag.kind, [])
    return f"allowed: {', '.join([*numbers, *flag.choices]) or flag.hint}"
