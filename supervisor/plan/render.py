"""Renders settings for the engine at hand. Pure, given the engine's Flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from supervisor.builds.help import (
    Flag,
    Flags,
    FlagValue,
    nearest,
    newest_flags,
    plain_name,
    recorded_names,
)
from supervisor.errors import SettingsInvalid
from supervisor.plan.setting import (
    IMPLIED,
    MOVED,
    MOVED_BACK,
    OLDER_WORDS,
    ONCE_BARE,
    SPELLINGS,
    reserved_reason,
)

# Settings use today's long names without dashes. A name or value that the build spells differently
# is translated. What the build has deprecated without a successor, removed, or never had is
# omitted, with the reason. A flag of no build, or a value that the build would reject, is an error.


@dataclass(frozen=True, slots=True)
class RenderedFlag:
    """One option of a command line: `value` is None for a switch, `note` names the translation."""

    key: str
    flag: str
    value: str | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class OmittedFlag:
    """A setting that this build does not get, and a clause why."""

    key: str
    value: FlagValue
    reason: str


@dataclass(frozen=True, slots=True)
class Rendered:
    lines: tuple[RenderedFlag, ...]
    omitted: tuple[OmittedFlag, ...]


def render(settings: Mapping[str, FlagValue], flags: Flags) -> Rendered:
    """Render settings by canonical key for a build.

    Raises:
        SettingsInvalid: A flag that no build has or users may not set, or an invalid value.
    """
    results = [_render_one(key, value, flags) for key, value in settings.items()]
    return Rendered(
        tuple(result for result in results if isinstance(result, RenderedFlag)),
        tuple(result for result in results if isinstance(result, OmittedFlag)),
    )


def canonical(name: str, value: FlagValue, flags: Flags) -> tuple[str, FlagValue]:
    """A setting in today's vocabulary, so that two spellings of one are equal.

    The name may be of any build, with or without dashes; `no-x = true` is `x = false`.

    Raises:
        SettingsInvalid: Users may not set this option.
    """
    key, value = _positive(plain_name(name), value, flags)
    key = _todays(key)
    if key not in SPELLINGS and (flag := flags.find(key)):
        key = _todays(flag.key)
    key, value = MOVED.get((key, value), (key, value))
    if key == "spec-type":
        value = _todays_word(key, value)
    if reason := reserved_reason(key):
        raise SettingsInvalid(f"{name} cannot be set: {reason}")
    return key, value


def _positive(key: str, value: FlagValue, flags: Flags) -> tuple[str, FlagValue]:
    """Turn a negative name `no-x` into `x` with the opposite value."""
    if not key.startswith("no-") or not isinstance(value, bool):
        return key, value
    positive = key.removeprefix("no-")
    flag = flags.find(positive)
    # --no-host is no opposite of --host, which takes a value.
    is_switch = flag is None or flag.kind in {"switch", "unknown"}
    return (positive, not value) if is_switch else (key, value)


def _todays(key: str) -> str:
    return next((new for new, old in SPELLINGS.items() if key in old), key)


def _todays_word(key: str, value: FlagValue) -> FlagValue:
    words = {old: word for (name, word), old in OLDER_WORDS.items() if name == key}
    return words.get(value, value)


def _render_one(key: str, value: FlagValue, flags: Flags) -> RenderedFlag | OmittedFlag:
    unusable: Flag | None = None
    for name, spelled in _spellings(key, value):
        flag = _find(name, flags)
        if flag and flag.is_usable:
            return _form(key, _Spelling(name, spelled, flag), flags) or _unsupported_value(
                key, value, flag
            )
        unusable = unusable or flag
    return OmittedFlag(key, value, IMPLIED.get((key, value)) or _reason_not(key, unusable))


@dataclass(frozen=True, slots=True)
class _Spelling:
    """A name and value that a build has for a setting."""

    name: str
    value: FlagValue
    flag: Flag


def _spellings(key: str, value: FlagValue) -> Iterator[tuple[str, FlagValue]]:
    """The spellings of a setting, newest first."""
    yield key, value
    for older in SPELLINGS.get(key, ()):
        yield older, value
    if moved := MOVED_BACK.get((key, value)):
        yield moved


def _find(name: str, flags: Flags) -> Flag | None:
    """The option; an older build may have its negative form only."""
    return flags.find(name) or flags.find(f"no-{name}")


def _reason_not(key: str, flag: Flag | None) -> str:
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


def _form(key: str, spelling: _Spelling, flags: Flags) -> RenderedFlag | None:
    """The rendered option, or None if the build has no form of this value."""
    note = f"this build names --{key} --{spelling.name}" if spelling.name != key else ""
    value = _spelled_for(spelling.flag, key, spelling.value)
    if isinstance(value, bool):
        wanted = spelling.name if value else f"no-{spelling.name}"
        return RenderedFlag(key, f"--{wanted}", None, note) if flags.find(wanted) else None
    if not _is_known(key, value, spelling.flag):
        return None
    dashes = "--" if f"--{spelling.name}" in spelling.flag.names else "-"
    return RenderedFlag(
        key, f"{dashes}{spelling.name}", _check_word(key, value, spelling.flag), note
    )


def _unsupported_value(key: str, value: FlagValue, flag: Flag) -> OmittedFlag:
    if isinstance(value, bool) or key in ONCE_BARE:
        reason = f"this build has no form of --{key} for its default"
    else:
        reason = f"this build's --{key} does not accept {value}, only {', '.join(flag.choices)}"
    return OmittedFlag(key, value, IMPLIED.get((key, value), reason))


def _spelled_for(flag: Flag, key: str, value: FlagValue) -> FlagValue:
    """The value in this build's words; a bool where the option is a switch in this build."""
    if key in ONCE_BARE and flag.hint is None:
        return value if isinstance(value, bool) else value == "on"
    if isinstance(value, bool) and (key in ONCE_BARE or {"on", "off"} <= set(flag.choices)):
        return "on" if value else "off"
    if isinstance(value, bool) and flag.kind not in {"switch", "unknown"}:
        raise SettingsInvalid(f"{key} needs a value ({flag.hint})", hint=_allowed_values(flag))
    if not isinstance(value, bool) and flag.kind == "switch":
        raise SettingsInvalid(f"{key} takes no value", hint=f"write {key} = true or {key} = false")
    older = OLDER_WORDS.get((key, value))
    return value if older is None or _takes(flag, value) else older


def _takes(flag: Flag, value: FlagValue) -> bool:
    return flag.kind == "unknown" or value in flag.choices


def _is_known(key: str, value: FlagValue, flag: Flag) -> bool:
    """Whether the build has a word; False only for words that the newest build has."""
    if flag.kind not in {"enum", "list"} or not flag.choices:
        return True
    newest = newest_flags().find(key)
    words = str(value).split(",") if flag.kind == "list" else [str(value)]
    unknown = [word for word in words if word not in flag.choices]
    return not (unknown and newest and set(unknown) <= set(newest.choices))


def _check_word(key: str, value: FlagValue, flag: Flag) -> str:
    """The value as a word of the command line."""
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
