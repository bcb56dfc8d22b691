"""Reads, merges and checks every source of settings."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from supervisor.errors import SettingsInvalid
from supervisor.settings.model import ModelTable
from supervisor.settings.problems import check_names, explain
from supervisor.settings.root import Settings

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
        SettingsInvalid: The file is missing, is no TOML, or says something that cannot be.
    """
    path = find_file(config, config_dir=config_dir, environ=environ)
    sources = {
        "file": _read(path) if path else {},
        "environment": EnvSettingsSource(Settings)(),
        "command line": dict(overrides or {}),
    }
    merged: dict[str, Any] = functools.reduce(_merged, sources.values(), {})
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise SettingsInvalid(
            explain(error, path), hint="corral config check reads it again"
        ) from error
    check_names(settings.models, path)
    origins = {key: name for name, table in sources.items() for key in flatten(table)}
    return Loaded(_relative_to(settings, path), path, origins)


def find_file(config: Path | None, *, config_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the settings file to read, or None when there is none.

    Raises:
        SettingsInvalid: A file was named, and it is not there.
    """
    named = config or (Path(environ["CORRAL_CONFIG"]) if environ.get("CORRAL_CONFIG") else None)
    if named is not None:
        if not named.expanduser().is_file():
            raise SettingsInvalid(
                f"there is no settings file {named}",
                hint="corral config path lists the places that are looked at",
            )
        return named.expanduser().absolute()
    return next((place.absolute() for place in search_path(config_dir) if place.is_file()), None)


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


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SettingsInvalid(
            f"{path} is not TOML: {error}", hint="see toml.io for the rules"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"{path} cannot be read: {error}") from error


def _relative_to(settings: Settings, path: Path | None) -> Settings:
    """Return the settings with relative paths counted from the file's directory."""
    base = path.parent if path else Path.cwd()

    def anchored(model: ModelTable) -> ModelTable:
        draft = base / model.draft if isinstance(model.draft, Path) else model.draft
        prompts = tuple(base / prompt for prompt in model.warm_prompts)
        return model.model_copy(
            update={"path": base / model.path, "draft": draft, "warm_prompts": prompts}
        )

    models = {name: anchored(model) for name, model in settings.models.items()}
    engine = settings.engine and base / settings.engine
    keys_file = settings.proxy.keys_file and base / settings.proxy.keys_file
    proxy = settings.proxy.model_copy(update={"keys_file": keys_file})
    nodes = {
        name: node.model_copy(update={"key_file": node.key_file and base / node.key_file})
        for name, node in settings.nodes.items()
    }
    anchors = {"models": models, "nodes": nodes, "engine": engine, "proxy": proxy}
    return settings.model_copy(update=anchors)
