"""Sets one value of `corral.toml`, or takes it out."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tomlkit

from supervisor.errors import SettingsInvalid
from supervisor.settings.edit import Edit, Table, edited, toml

_KEY_HINT = (
    'parts with other signs than letters, digits, - and _ are quoted: models."qwen3:8b".path'
)


def key_parts(key: str) -> tuple[str, ...]:
    """Read a dotted key as TOML does; a part with other signs may also stand without quotes.

    Raises:
        SettingsInvalid: It is no key.
    """
    parts = _as_toml(key) or tuple(key.split("."))
    if not all(parts) or not key.isprintable():
        raise SettingsInvalid(f"{key!r} is not the key of a setting", hint=_KEY_HINT)
    return parts


def _as_toml(key: str) -> tuple[str, ...]:
    if not key.isprintable() or "=" in key or "#" in key:
        return ()
    try:
        found: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    parts = []
    while isinstance(found, dict):
        ((part, found),) = found.items()
        parts.append(part)
    return tuple(parts)


def key_text(parts: Sequence[str]) -> str:
    """Write a dotted key as TOML does, with quotes where a part needs them."""
    return tomlkit.key(list(parts)).as_string()


def values_of(word: str) -> Iterator[object]:
    """Return what a word of the command line may mean: a TOML value first, then a text."""
    try:
        found = tomllib.loads(f"value = {word}")
    except (tomllib.TOMLDecodeError, RecursionError):
        found = {}
    if found.keys() == {"value"}:
        yield found["value"]
    yield word


def with_value(text: str, key: tuple[str, ...], value: object) -> Edit:
    """Set a value. Raises SettingsInvalid: a part of the key is no table, or the text no TOML."""
    edit = _edited(text, key, functools.partial(_set, key=key, value=value))
    return Edit(edit, (f"{key_text(key)} = {toml(value)}",))


def without_value(text: str, key: tuple[str, ...]) -> Edit:
    """Take a value or a table out. Raises SettingsInvalid: the file does not have it."""
    name = key_text(key)
    if not _has(tomllib.loads(text), key):
        raise SettingsInvalid(
            f"the settings file does not set {name}",
            hint="corral config show lists every setting, and where it comes from",
        )
    return Edit(_edited(text, key, functools.partial(_remove, key=key)), (f"{name} is not set",))


def _edited(text: str, key: tuple[str, ...], change: Callable[[Table], None]) -> str:
    try:
        return edited(text, change)
    except (LookupError, TypeError) as error:
        raise SettingsInvalid(f"{'.'.join(key)}: a part of this key is not a table") from error


def _set(whole: Table, key: tuple[str, ...], value: object) -> None:
    table = whole
    for depth, part in enumerate(key[:-1]):
        if part not in table:
            has_only_tables = depth < len(key) - 2
            table[part] = tomlkit.table(is_super_table=has_only_tables)
        table = table[part]
    table[key[-1]] = value


def _remove(whole: Table, key: tuple[str, ...]) -> None:
    table = functools.reduce(lambda table, part: table[part], key[:-1], whole)
    del table[key[-1]]
    if not table and key[:-1]:
        _remove(whole, key[:-1])


def _has(whole: Mapping[str, Any], key: tuple[str, ...]) -> bool:
    found: Any = whole
    for part in key:
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True
