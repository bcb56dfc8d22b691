"""Options of llama-server by name, as they become the flags and other keys of a model.

Source: llama.cpp, common/arg.cpp: an option given twice counts as it was given last, but for those
that collect values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor.engines.help import FlagValue, newest_flags, plain, recorded_flag
from supervisor.errors import SettingsInvalid
from supervisor.flags.renames import ONCE_BARE
from supervisor.flags.render import canonical
from supervisor.host.files import expanded

Option = tuple[str, str | None]

_COLLECTED: Final = frozenset({"lora", "lora-scaled", "override-kv", "override-tensor"})
_DIGITS_MAX: Final = 20  # TOML has 64 bits
_TRUE: Final = frozenset({"1", "true", "on", "enabled"})
_FALSE: Final = frozenset({"0", "false", "off", "disabled"})
_HUB: Final = frozenset({"hf-repo", "hf-file"})
_SECRET: Final = frozenset({"api-key", "hf-token"})


@dataclass
class ModelOptions:
    """What the options of one engine say."""

    path: str | None = None
    aliases: list[str] = field(default_factory=list)
    host: str | None = None
    port: str | None = None
    flags: dict[str, FlagValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, name: str, value: str | None) -> None:
        """Take over one option of any build, with or without its dashes."""
        key = _key(name)
        match key:
            case "model":
                self.path = value
            case "alias":
                self.aliases += [one for part in (value or "").split(",") if (one := part.strip())]
            case "host":
                self.host = value
            case "port":
                self.port = value
            case _:
                self._take_flag(name, key, value)

    def _take_flag(self, name: str, key: str, value: str | None) -> None:
        if key in _HUB:
            self.notes.append(
                f"{name} {value}: corral model get {value} downloads it; then set path to the file"
            )
            return
        shown = name if value is None or key in _SECRET else f"{name} {value}"
        if not recorded_flag(name):
            self.notes.append(f"{shown}: no known build of llama-server has it")
            return
        try:
            key, typed = canonical(name, _typed(name, value), newest_flags())
        except SettingsInvalid as error:
            self.notes.append(f"{shown}: {error.message.partition(': ')[2]}")
            return
        if key in _COLLECTED and key in self.flags:
            typed = f"{self.flags[key]},{typed}"
        self.flags[key] = typed


def options_of(words: Sequence[str]) -> Iterator[Option]:
    """Read the words of a command line after the program's name."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        count = min(_value_count(word, rest), len(rest))
        values, rest = rest[:count], rest[count:]
        yield word, ":".join(values) if values else None


def _value_count(word: str, rest: Sequence[str]) -> int:
    """Return how many of the next words are values of an option."""
    flag = recorded_flag(word) if word.startswith("-") else None
    if flag is None:
        return 0 if not word.startswith("-") else _unknown_count(rest)
    if flag.hint is None:
        return 0
    if flag.key in ONCE_BARE and (not rest or _is_option(rest[0])):
        return 0
    return len(flag.hint.split())


def _unknown_count(rest: Sequence[str]) -> int:
    return int(bool(rest) and not _is_option(rest[0]))


def _is_option(word: str) -> bool:
    return word.startswith("-") and not _is_number(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _key(name: str) -> str:
    flag = recorded_flag(name)
    return flag.key if flag else plain(name)


def _typed(name: str, value: str | None) -> FlagValue:
    """Return a value as settings have it: a number, a word, or true for a bare option."""
    flag = recorded_flag(name)
    if value is None:
        return "on" if flag and flag.key in ONCE_BARE else True
    if flag and flag.hint is None and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    if _is_number(value) and not (flag and flag.kind in {"path", "string", "list"}):
        is_integer = value.lstrip("+-").isdecimal() and len(value) < _DIGITS_MAX
        return int(value) if is_integer else float(value)
    return value


def resolved(path: str, base: Path) -> str:
    """Return a path of a source, relative to the directory that it is read from."""
    return str(base / expanded(Path(path)))


def unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
