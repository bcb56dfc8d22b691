"""Reads the YAML of other programs' settings as values of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from itertools import count
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from supervisor.errors import SettingsInvalid

_VALUES_MAX: Final = 100_000  # YAML aliases multiply values
_DEPTH_MAX: Final = 32
_INTEGER_MAX: Final = 2**63 - 1  # of TOML


def read_yaml(text: str, what: str = "settings of llama-swap") -> Mapping[str, Any]:
    """Parse YAML to JSON values. Raises SettingsInvalid: no YAML, no table, tags, or too large."""
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # YAML allows them
    try:
        for event in yaml.parse(StringIO(text)):
            if tag := getattr(event, "tag", None):  # constructors raise anything for a wrong value
                short = tag.replace("tag:yaml.org,2002:", "!!")
                raise SettingsInvalid(f"no tags are read in {what}; leave out {short}")
        found = _to_json_values(yaml.load(StringIO(text)), count(1), 0)
    except (YAMLError, ValueError, RecursionError) as error:
        first, *_ = str(error).splitlines() or ["it is nested too deep"]
        raise SettingsInvalid(f"this is not YAML: {first}") from error
    if not isinstance(found, Mapping):
        raise SettingsInvalid("these are not settings of llama-swap: there is no models:")
    return found


def _to_json_values(value: object, number: Iterator[int], depth: int) -> Any:
    """Convert a YAML value to the types of JSON; raises SettingsInvalid if it is too large."""
    if depth > _DEPTH_MAX or next(number) > _VALUES_MAX:
        raise SettingsInvalid(
            f"more than {_DEPTH_MAX} levels or {_VALUES_MAX} values are no settings of llama-swap"
        )
    match value:
        case Mapping():
            return {
                expand_text(key): _to_json_values(member, number, depth + 1)
                for key, member in value.items()
            }
        case list():
            return [_to_json_values(element, number, depth + 1) for element in value]
        case int() if abs(value) > _INTEGER_MAX:
            raise SettingsInvalid("an integer has more than 64 bits")
    return value if isinstance(value, bool | int | float | None) else expand_text(value)


def table_or_empty(value: object, *keys: str) -> Mapping[str, Any]:
    """Return a table, or the table at these keys in it; {} if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [expand_text(value) for value in values if isinstance(value, str | int | float)]


def expand_text(value: object) -> str:
    """Return a scalar as YAML text; lone surrogates become `?`."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
    return str(value).encode(errors="replace").decode()
