"""The YAML settings of llama-swap.

Source: llama-swap, internal/config and config.example.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from supervisor.conversion.command_line import (
    converted_model,
    program_options,
    read_options,
    split,
)
from supervisor.conversion.converted import Converted, ConvertedModel, without_equivalent
from supervisor.conversion.macros import expanded, from_environment
from supervisor.errors import SettingsInvalid

_NAME: Final = "llama-swap file"
_DEFAULT_LISTEN: Final = "127.0.0.1:8080"
# llama-corral does these by itself, or they concern only llama-swap's own ports and log.
_NEEDLESS: Final = frozenset(
    {"checkEndpoint", "cmdStop", "proxy", "startPort", "unloadTimeout", "macros", "useModelName"}
    | {"logLevel", "logTimeFormat", "logToStdout", "logRequests", "metricsMaxInMemory", "name"}
    | {"performance", "ui", "upstream", "description", "metadata", "capabilities", "compat"}
)
_MODEL_KEYS: Final = frozenset({"aliases", "cmd", "env", "filters", "ttl"})
_GLOBAL_KEYS: Final = frozenset(
    {"apiKeys", "globalTTL", "groups", "healthCheckTimeout", "hooks", "models", "peers", "routing"}
)


def convert(text: str, base: Path, environ: Mapping[str, str]) -> Converted:
    """Convert settings whose relative paths begin at a directory.

    Raises:
        SettingsInvalid: The text is no YAML, or has no models.
    """
    whole = read_yaml(from_environment(text, environ))
    models, notes = [], list(_notes(whole))
    for name, entry in _table(whole.get("models")).items():
        made = _model(str(name), _table(entry), whole, base)
        if isinstance(made, ConvertedModel):
            models.append(made)
        else:
            notes.append(made)
    return Converted(_NAME, tuple(models), _tables(whole), tuple(notes))


def read_yaml(text: str) -> Mapping[str, Any]:
    """Parse YAML without objects. Raises SettingsInvalid."""
    try:
        found = YAML(typ="safe", pure=True).load(StringIO(text))
    except (YAMLError, ValueError, RecursionError) as error:
        first, *_ = str(error).splitlines() or ["it is nested too deep"]
        raise SettingsInvalid(f"this is not YAML: {first}") from error
    if not isinstance(found, Mapping):
        raise SettingsInvalid("these are not settings of llama-swap: there is no models:")
    return found


def _model(
    name: str, entry: Mapping[str, Any], whole: Mapping[str, Any], base: Path
) -> ConvertedModel | str:
    """Return a model, or a sentence why there is none."""
    macros = {**_macros(whole), **_macros(entry), "MODEL_ID": name}
    entry = expanded({**entry, "macros": None}, macros)
    command = entry.get("cmd")
    found = program_options(split(command)) if isinstance(command, str) else None
    if found is None:
        return f"{name}: its cmd does not start llama-server"
    options = read_options(found[1])
    if options.path is None:
        return f"{name}: {'; '.join(options.notes) or 'its cmd names no model (--model)'}"
    options.notes += _model_notes(entry)
    aliases = [str(one) for one in entry.get("aliases") or ()]
    return converted_model(name, options, base, aliases=aliases, **_residency(name, entry, whole))


def _residency(name: str, entry: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    ttl = entry.get("ttl", -1)
    ttl_s = whole.get("globalTTL", 0) if ttl == -1 else ttl
    preloaded = _table(_table(whole.get("hooks")).get("on_startup")).get("preload") or ()
    is_pinned = any(
        group.get("persistent") and name in (group.get("members") or ()) for group in _groups(whole)
    )
    return {
        "preload": name in preloaded,
        **({"ttl_s": ttl_s} if ttl_s else {}),
        **({"pinned": True} if is_pinned else {}),
        **_variants(name, _table(entry.get("filters"))),
    }


def _variants(name: str, filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request members of `setParamsByID` as variants, whose names are NAME:VARIANT."""
    strip = [one.strip() for one in str(filters.get("stripParams") or "").split(",") if one.strip()]
    members = dict(_table(filters.get("setParams")))
    found: dict[str, dict[str, Any]] = {
        str(key).removeprefix(f"{name}:"): {"set": {**members, **_table(value)}}
        for key, value in _table(filters.get("setParamsByID")).items()
        if str(key).startswith(f"{name}:")
    }
    for variant in found.values():
        if kept := [one for one in strip if one not in variant["set"]]:
            variant["strip"] = kept
    return {"variants": found} if found else {}


def _model_notes(entry: Mapping[str, Any]) -> Iterator[str]:
    filters = _table(entry.get("filters"))
    if filters.get("setParams") or filters.get("stripParams"):
        yield (
            "filters change every request of the model; here a variant does, which clients name: "
            "variants.NAME with set and strip"
        )
    if environment := entry.get("env"):
        yield f"env is not set for one model: {', '.join(map(str, environment))}"
    yield from without_equivalent(sorted(set(entry) - _NEEDLESS - _MODEL_KEYS))


def _tables(whole: Mapping[str, Any]) -> dict[str, Any]:
    load_timeout_s = whole.get("healthCheckTimeout")
    nodes = {
        str(name): _node(expanded(_table(peer), _macros(whole)))
        for name, peer in _table(whole.get("peers")).items()
    }
    return {
        "proxy": {"listen": _DEFAULT_LISTEN},
        **({"supervisor": {"load_timeout_s": load_timeout_s}} if load_timeout_s else {}),
        **({"nodes": nodes} if nodes else {}),
    }


def _node(peer: Mapping[str, Any]) -> dict[str, Any]:
    models = [str(one) for one in peer.get("models") or ()]
    return {"url": str(peer.get("proxy", "")), **({"models": models} if models else {})}


def _notes(whole: Mapping[str, Any]) -> Iterator[str]:
    if whole.get("apiKeys"):
        yield "apiKeys: corral key add NAME makes a new key for each client"
    for name, peer in _table(whole.get("peers")).items():
        if _table(peer).get("apiKey"):
            yield (
                f"peers.{name}.apiKey: write it into a file of mode 0600, key_file of "
                f"[nodes.{name}]"
            )
    if any(_groups(whole)):
        yield "groups: models stay loaded together while memory has room; limits are not needed"
    yield from without_equivalent(sorted(set(whole) - _NEEDLESS - _GLOBAL_KEYS))


def _groups(whole: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    router = _table(_table(whole.get("routing")).get("router"))
    nested = _table(_table(router.get("settings")).get("groups"))
    for group in (*_table(whole.get("groups")).values(), *nested.values()):
        yield _table(group)


def _macros(table: Mapping[str, Any]) -> Mapping[str, Any]:
    return {str(name): value for name, value in _table(table.get("macros")).items()}


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
