"""Converts the YAML settings of llama-swap, and expands their macros.

Macros are `${NAME}` in texts, lists and tables. `${env.X}` is replaced first, then each macro in
turn, the last declared first, so that a macro may use earlier ones. The macros of a model win over
the global macros. `${PORT}` and `${PID}` stay, as they are known only when a model starts.

Source: llama-swap, internal/config, internal/config/macros.go and config.example.yaml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from proxy.auth.keys_file import FILE_NAME as KEYS_FILE
from supervisor.builds.help import Flags
from supervisor.errors import SettingsInvalid
from supervisor.settings.import_flags import (
    Converted,
    ConvertedModel,
    no_equivalent_notes,
    read_command,
    split_list,
)
from supervisor.settings.import_shell import engine_command, split

_ENVIRONMENT: Final = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_TEXT_MAX: Final = 65_536


def from_environment(text: str, environ: Mapping[str, str]) -> str:
    """Replace `${env.X}`; unknown variables stay."""
    return _ENVIRONMENT.sub(lambda found: environ.get(found[1], found[0]), text)


def expand_macros(value: Any, macros: Mapping[str, object]) -> Any:
    """Replace macros, the last first; unknown macros stay.

    Raises:
        SettingsInvalid: The result is longer than 65,536 characters.
    """
    if isinstance(value, str):
        return _expanded_text(value, macros)
    if isinstance(value, list):
        return [expand_macros(element, macros) for element in value]
    if isinstance(value, Mapping):
        return {
            expand_macros(key, macros): expand_macros(member, macros)
            for key, member in value.items()
        }
    return value


def _expanded_text(text: str, macros: Mapping[str, object]) -> str:
    for name in reversed(tuple(macros)):
        text = text.replace(f"${{{name}}}", str(macros[name]))
        if len(text) > _TEXT_MAX:
            raise SettingsInvalid(
                f"the macro {name} makes a text longer than {_TEXT_MAX} characters"
            )
    return text


_LLAMA_SWAP: Final = "llama-swap file"
_DEFAULT_LISTEN: Final = "127.0.0.1:8080"
_VALUES_MAX: Final = 100_000  # YAML aliases multiply values
_DEPTH_MAX: Final = 32
_INTEGER_MAX: Final = 2**63 - 1  # of TOML
# llama-corral needs no setting for these, or they concern only llama-swap's own ports and log.
_NEEDLESS: Final = frozenset(
    {"checkEndpoint", "cmdStop", "proxy", "startPort", "unloadTimeout", "macros", "useModelName"}
    | {"logLevel", "logTimeFormat", "logToStdout", "logRequests", "metricsMaxInMemory", "name"}
    | {"performance", "ui", "upstream", "description", "metadata", "capabilities", "compat"}
)
_MODEL_KEYS: Final = frozenset({"aliases", "cmd", "env", "filters", "ttl"})
_GLOBAL_KEYS: Final = frozenset(
    {"apiKeys", "globalTTL", "groups", "healthCheckTimeout", "hooks", "models", "peers", "routing"}
)


def convert_llama_swap(
    text: str, base: Path, environ: Mapping[str, str], known: Flags | None = None
) -> Converted:
    """Convert settings whose relative paths start at `base`; `known` as in `convert_commands`.

    Raises:
        SettingsInvalid: The text is not YAML, or is not a table.
    """
    whole = read_yaml(from_environment(text, environ))
    models, omitted = [], list(_omitted_keys(whole))
    for name, entry in _table_or_empty(whole.get("models")).items():
        made = _llama_swap_model(name, _table_or_empty(entry), whole, base, known)
        if isinstance(made, ConvertedModel):
            models.append(made)
        else:
            omitted.append(made)
    named = _texts(whole.get("apiKeys"))
    keys = tuple(key for key in named if key and "${env." not in key)
    if len(keys) < len(named):
        omitted.append("apiKeys: a variable of the environment is not set here")
    tables = _tables(whole, has_keys=bool(keys))
    return Converted(_LLAMA_SWAP, tuple(models), tables, tuple(omitted), keys=keys)


def read_yaml(text: str, what: str = "settings of llama-swap") -> Mapping[str, Any]:
    """Parse YAML into the values of JSON.

    Raises:
        SettingsInvalid: The text is not YAML, has tags, is too large, or is not a table.
    """
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
                _text(key): _to_json_values(member, number, depth + 1)
                for key, member in value.items()
            }
        case list():
            return [_to_json_values(element, number, depth + 1) for element in value]
        case int() if abs(value) > _INTEGER_MAX:
            raise SettingsInvalid("an integer has more than 64 bits")
    return value if isinstance(value, bool | int | float | None) else _text(value)


def _llama_swap_model(
    name: str, entry: Mapping[str, Any], whole: Mapping[str, Any], base: Path, known: Flags | None
) -> ConvertedModel | str:
    """Return a model, or a sentence that says why it was omitted."""
    macros = {**_macros(whole), **_macros(entry), "MODEL_ID": name}
    entry = expand_macros({**entry, "macros": None}, macros)
    command = entry.get("cmd")
    started = engine_command(split(command)) if isinstance(command, str) else None
    if started is None:
        return f"{name}: its cmd does not start llama-server"
    assigned = dict(word.partition("=")[::2] for word in _texts(entry.get("env")))
    started = replace(started, variables={**assigned, **started.variables})
    read = read_command(started, base, known)
    if read.options.keys:
        read.options.omitted.append("--api-key: llama-corral gives each engine a random key")
    read.options.omitted += _model_omitted(entry)
    engine = {"engine": read.program} if read.program else {}
    more = {"aliases": _texts(entry.get("aliases")), **engine, **_residency(name, entry, whole)}
    reason = "; ".join(read.options.omitted) or "its cmd names no model (--model)"
    return read.model(name, **more) or f"{name}: {reason}"


def _residency(name: str, entry: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    ttl_s = _seconds(entry, "ttl", -1)
    if ttl_s == -1:
        ttl_s = _seconds(whole, "globalTTL", 0)
    preloaded = _texts(
        _table_or_empty(_table_or_empty(whole.get("hooks")).get("on_startup")).get("preload")
    )
    is_pinned = any(
        group.get("persistent") and name in _texts(group.get("members")) for group in _groups(whole)
    )
    return {
        "preload": name in preloaded,
        **({"ttl_s": ttl_s} if ttl_s else {}),
        **({"pinned": True} if is_pinned else {}),
        **_variants(name, _table_or_empty(entry.get("filters"))),
    }


def _variants(name: str, filters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `setParamsByID`, whose keys are NAME:VARIANT, to variants."""
    strip = split_list(",".join(_texts(filters.get("stripParams"))))
    members = _table_or_empty(filters.get("setParams"))
    found: dict[str, dict[str, Any]] = {
        key.removeprefix(f"{name}:"): {"set": _without_null({**members, **_table_or_empty(value)})}
        for key, value in _table_or_empty(filters.get("setParamsByID")).items()
        if key.startswith(f"{name}:")
    }
    for variant in found.values():
        if kept := [name for name in strip if name not in variant["set"]]:
            variant["strip"] = kept
    return {"variants": found} if found else {}


def _model_omitted(entry: Mapping[str, Any]) -> Iterator[str]:
    filters = _table_or_empty(entry.get("filters"))
    if filters.get("setParams") or filters.get("stripParams"):
        yield (
            "filters change every request of the model; here a variant does, which clients name: "
            "variants.NAME with set and strip"
        )
    if _table_or_empty(filters.get("setParamsByID")) != _without_null(
        _table_or_empty(filters.get("setParamsByID"))
    ):
        yield "null in setParamsByID: TOML has none"
    yield from no_equivalent_notes(set(entry) - _NEEDLESS - _MODEL_KEYS)


def _tables(whole: Mapping[str, Any], *, has_keys: bool) -> dict[str, Any]:
    load_timeout_s = _seconds(whole, "healthCheckTimeout", 0)
    nodes = {
        name: _node(expand_macros(_table_or_empty(peer), _macros(whole)))
        for name, peer in _table_or_empty(whole.get("peers")).items()
    }
    return {
        "proxy": {
            "listen": _DEFAULT_LISTEN,
            **({"api_keys_file": KEYS_FILE} if has_keys else {}),
        },
        **({"supervisor": {"load_timeout_s": load_timeout_s}} if load_timeout_s else {}),
        **({"nodes": nodes} if nodes else {}),
    }


def _node(peer: Mapping[str, Any]) -> dict[str, Any]:
    models = _texts(peer.get("models"))
    return {"url": "".join(_texts(peer.get("proxy"))), **({"models": models} if models else {})}


def _omitted_keys(whole: Mapping[str, Any]) -> Iterator[str]:
    for name, peer in _table_or_empty(whole.get("peers")).items():
        if _table_or_empty(peer).get("apiKey"):
            yield (
                f"peers.{name}.apiKey: write it into a file of mode 0600, key_file of "
                f"[nodes.{name}]"
            )
    if any(_groups(whole)):
        yield "groups: models stay loaded together while memory has room; limits are not needed"
    yield from no_equivalent_notes(set(whole) - _NEEDLESS - _GLOBAL_KEYS)


def _groups(whole: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    router = _table_or_empty(_table_or_empty(whole.get("routing")).get("router"))
    nested = _table_or_empty(_table_or_empty(router.get("settings")).get("groups"))
    for group in (*_table_or_empty(whole.get("groups")).values(), *nested.values()):
        yield _table_or_empty(group)


def _macros(table: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: _text(value) for name, value in _table_or_empty(table.get("macros")).items()}


def _table_or_empty(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_text(value) for value in values if isinstance(value, str | int | float)]


def _text(value: object) -> str:
    """Return a scalar as YAML text; lone surrogates become `?`."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
    return str(value).encode(errors="replace").decode()


def _seconds(table: Mapping[str, Any], key: str, default: int) -> float:
    """Return a number of seconds; raises SettingsInvalid if the value is not a number."""
    value = table.get(key)
    if value is None:
        return default
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:  # a macro gives texts
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise SettingsInvalid(f"{key} is {_text(value)[:40]!r}, not a number of seconds")


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_without_null(element) for element in value if element is not None]
    return value
