"""Reads, merges and checks every source of settings."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from proxy.toml_text import DEPTH_MAX, is_deeper
from supervisor.errors import SettingsInvalid
from supervisor.host.files import NotRegular, expanded, stat_regular
from supervisor.host.toml_file import read_toml
from supervisor.output import warn
from supervisor.settings import trust
from supervisor.settings.messages import check_names, check_tables, explain
from supervisor.settings.schema import ModelSettings, Settings

FILE_NAME: Final = "corral.toml"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and where they came from.

    Attributes:
        settings: The merged value.
        path: The file that was read, or None.
        origins: Dotted key → "file", "environment" or "command line"; what is absent is a default.
    """

    settings: Settings
    path: Path | None
    origins: Mapping[str, str]


def load(
    config: Path | None = None,
    *,
    config_dir: Path,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """Read, merge and check every source.

    Args:
        config: What `--config` named, or None to look for the file.
        config_dir: The user's config directory.
        overrides: Values of the command line, shaped like the file.
        environ: The environment; only `CORRAL_CONFIG` is taken from it here, pydantic-settings
            reads the rest from the process's own.

    Raises:
        SettingsInvalid: The file is missing, is no TOML, or says something that cannot be; or a
            variable does.
    """
    path = find_file(config, config_dir=config_dir, environ=environ)
    sources = {
        "file": read_toml(path) if path else {},
        "environment": _environment(),
        "command line": dict(overrides or {}),
    }
    merged: dict[str, Any] = functools.reduce(_merged, sources.values(), {})
    check_tables(merged, path)
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise SettingsInvalid(
            explain(error, path), hint="corral config check reads it again"
        ) from error
    check_names(settings.models, path)
    origins = {key: name for name, table in sources.items() for key in flatten(table)}
    return Loaded(_resolved(settings, path.parent if path else _here()), path, origins)


def find_file(config: Path | None, *, config_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the settings file to read, or None when there is none; warn of what is doubtful.

    A file in the current directory that others can have written is left aside.

    Raises:
        SettingsInvalid: A file was named, and it is not there.
    """
    named = config or (Path(environ["CORRAL_CONFIG"]) if environ.get("CORRAL_CONFIG") else None)
    if named is not None:
        return _trusted(_named(named))
    here, at_home = search_path(config_dir)
    if _is_there(here):
        if (reason := _doubts(here)) is None:
            return here.absolute()
        warn(
            f"{here.absolute()} is left aside: {reason}; if it is yours, "
            f"put that right or name it: --config {here}"
        )
    return _trusted(at_home.absolute()) if _is_there(at_home) else None


def _named(path: Path) -> Path:
    found = expanded(path)
    try:
        stat_regular(found)
    except OSError as error:
        reason = error.strerror if isinstance(error, NotRegular) else None
        raise SettingsInvalid(
            f"there is no settings file {path}" + (f": it {reason}" if reason else ""),
            hint="corral config path lists the places that are looked at",
        ) from error
    return found.absolute()


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a directory that may not be entered
        return False


def _trusted(path: Path) -> Path:
    """Return the path of a file that counts in any case, with a warning where others can write."""
    if reason := _doubts(path):
        warn(f"the settings file {path} may be another's: {reason}")
    return path


def _doubts(path: Path) -> str | None:
    try:
        return trust.doubts(trust.see(path), trust.this_user())
    except OSError as error:
        return f"it cannot be looked at ({error.strerror})"


def search_path(config_dir: Path) -> tuple[Path, ...]:
    """Return where the file is looked for when none is named, first wins."""
    return (Path(FILE_NAME), config_dir / FILE_NAME)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested tables as one; where both have a leaf, `over` wins."""
    both = {
        key: _merged(under[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(under.get(key), Mapping)
    }
    return {**under, **over, **both}


def _environment() -> dict[str, Any]:
    """Return what the variables of the environment say.

    Raises:
        SettingsInvalid: One of them holds no JSON where it must, or is nested too deep.
    """
    try:
        found = EnvSettingsSource(Settings)()
    except (SettingsError, ValueError, RecursionError) as error:
        raise SettingsInvalid(
            f"a variable CORRAL_… cannot be read: {error}",
            hint="a table is set by JSON, or key by key: CORRAL_PROXY__LISTEN=HOST:PORT",
        ) from error
    if is_deeper(found, DEPTH_MAX):
        raise SettingsInvalid(f"a variable CORRAL_… is nested deeper than {DEPTH_MAX} levels")
    return found


def _resolved(settings: Settings, base: Path) -> Settings:
    """Return the settings with relative paths joined to a directory, and restart policies whole."""

    def resolve_model(name: str, model: ModelSettings) -> ModelSettings:
        update = {
            "path": base / model.path,
            "draft": base / model.draft if isinstance(model.draft, Path) else model.draft,
            "warm_prompts": tuple(base / prompt for prompt in model.warm_prompts),
            "restart": settings.restart_policy(name),
        }
        return model.model_copy(update=update)

    proxy = settings.proxy
    api_keys_file = proxy.api_keys_file and base / proxy.api_keys_file
    update = {
        "engine": settings.engine and base / settings.engine,
        "proxy": proxy.model_copy(update={"api_keys_file": api_keys_file}),
        "models": {name: resolve_model(name, one) for name, one in settings.models.items()},
        "nodes": {
            name: node.model_copy(update={"key_file": node.key_file and base / node.key_file})
            for name, node in settings.nodes.items()
        },
    }
    return settings.model_copy(update=update)


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed; no relative path means anything
        return Path("/")
