"""Reads, merges and checks the settings: the file, the environment and the command line."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from pydantic import BaseModel, ValidationError

from proxy.common.toml_text import DEPTH_MAX, is_deeper
from supervisor.errors import SettingsInvalid
from supervisor.models import model_lookup
from supervisor.models.local_stores import roots
from supervisor.output import warn
from supervisor.plan.loras import absolute
from supervisor.settings.messages import conflicts, explain, refusal, shared_names, unknown_tables
from supervisor.settings.schema import ModelSettings, Settings
from supervisor.system import ownership
from supervisor.system.files import NotRegular, expand_home, stat_regular
from supervisor.system.paths import directories
from supervisor.system.toml_file import has_key, line_of, parse_content, read_limited

FILE_NAME: Final = "corral.toml"
_PREFIX: Final = "CORRAL_"  # of variables


@dataclass(frozen=True, slots=True)
class Loaded:
    settings: Settings
    path: Path | None  # the file that was read, or None
    # "file", "environment" or "command line" by dotted key; other keys have defaults.
    origins: Mapping[str, str]

    def with_models(self, models: Mapping[str, ModelSettings]) -> Loaded:
        """Add models whose names are free. Raises SettingsInvalid: an alias is another's name."""
        known = self.settings.models
        policy = self.settings.supervisor.restart
        further = {
            name: model.model_copy(update={"restart": policy})
            for name, model in models.items()
            if name not in known
        }
        both = {**known, **further}
        if problems := list(shared_names(both)):
            raise refusal(problems, lambda _: "")
        return replace(self, settings=self.settings.model_copy(update={"models": both}))

    def with_changes(self, changes: Mapping[str, ModelSettings]) -> Loaded:
        """Apply the settings that are given for known models; flags are merged, a path is not used.

        Raises SettingsInvalid: the settings contradict each other.
        """
        known = self.settings.models
        changed = {
            name: changed_model(known[name], changes[name]) for name in changes if name in known
        }
        models = {**known, **changed}
        settings = self.settings.model_copy(update={"models": models})
        if problems := list(conflicts(settings)):
            raise refusal(problems, lambda _: "")
        return replace(self, settings=settings)


def changed_model(model: ModelSettings, change: ModelSettings) -> ModelSettings:
    """Return a model with the settings that are given in `change`, except a path."""
    given = {key: getattr(change, key) for key in change.model_fields_set - {"path"}}
    return model.model_copy(update={**given, "flags": {**model.flags, **change.flags}})


def load(
    config: Path | None = None,
    *,
    config_dir: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    content: bytes | None = None,
) -> Loaded:
    """Read, merge and check every source.

    Args:
        config: The file of `--config`, or None to search for a file.
        config_dir: None for that of `directories()`.
        overrides: Values from the command line, shaped like the file.
        environ: Used for `CORRAL_CONFIG` only; pydantic-settings reads the process's environment.
        content: Taken in place of the file's content.

    Raises SettingsInvalid: the file is missing or not TOML, or a value is invalid.
    """
    config_dir = config_dir or directories().config
    path = find_file(config, config_dir=config_dir, environ=environ)
    if path is None:
        return merge({}, None, overrides)
    content = read_limited(path) if content is None else content
    return merge(parse_content(content, path), path, overrides, content)


def merge(
    table: Mapping[str, Any],
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    content: bytes | None = None,
) -> Loaded:
    """Merge and check the table of a settings file with the other sources; raises as `load`.

    Errors name lines of `content`, or else of the file.
    """
    sources = {"file": table, "environment": _environment(), "command line": dict(overrides or {})}
    merged: dict[str, Any] = functools.reduce(_merge_tables, sources.values(), {})
    place = functools.partial(_place, sources, path, content)
    problems = list(unknown_tables(merged))
    try:
        settings = Settings(**{key: merged[key] for key in merged.keys() & Settings.model_fields})
    except ValidationError as error:
        raise refusal([*problems, *explain(error)], place) from error
    if problems := [*problems, *conflicts(settings)]:
        raise refusal(problems, place)
    origins = {key: name for name, table in sources.items() for key in flatten(table)}
    return Loaded(
        _resolve_paths(settings, path.parent if path else _current_directory()), path, origins
    )


def _place(
    sources: Mapping[str, Mapping[str, Any]],
    path: Path | None,
    content: bytes | None,
    key: Sequence[str],
) -> str:
    """Return the place that sets a key or should set it: `FILE:LINE: ` or `the variable NAME: `."""
    if has_key(sources["command line"], key):
        return ""
    names = {name.upper() for name in os.environ}
    if has_key(sources["environment"], key):
        variables = ("CORRAL_" + "__".join(key[:end]).upper() for end in range(len(key), 0, -1))
        return next((f"the variable {name}: " for name in variables if name in names), "")
    if path is None:
        return ""
    if content is None:
        with suppress(SettingsInvalid):
            content = read_limited(path)
    line = line_of(content or b"", key)
    return f"{path}:{line}: " if line else f"{path}: "


def read_models(tables: Mapping[str, object]) -> dict[str, ModelSettings]:
    """Check a `[models]` table that is in no file, with absolute paths. Raises SettingsInvalid."""
    try:
        return Settings.model_validate({"models": tables}).models
    except ValidationError as error:
        raise refusal(list(explain(error)), lambda _: "") from error


def read_changes(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, ModelSettings]:
    """Check settings of models for `Loaded.with_changes`; a path may be missing."""
    return read_models({name: {"path": "unused.gguf", **table} for name, table in tables.items()})


def find_file(config: Path | None, *, config_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the settings file to read, or None.

    A file in the current directory that others could have written is ignored with a warning. Raises
    SettingsInvalid: a named file is missing.
    """
    named = config or (Path(environ["CORRAL_CONFIG"]) if environ.get("CORRAL_CONFIG") else None)
    if named is not None:
        return _warn_unless_trusted(_named_settings_file(named))
    here, at_home = search_path(config_dir)
    if _is_there(here):
        if (reason := _doubts(here)) is None:
            return here.absolute()
        warn(
            f"{here.absolute()} is ignored: {reason}; if it is yours, "
            f"correct that or name it: --config {here}"
        )
    return _warn_unless_trusted(at_home.absolute()) if _is_there(at_home) else None


def _named_settings_file(path: Path) -> Path:
    found = expand_home(path)
    try:
        stat_regular(found)
    except OSError as error:
        reason = error.strerror if isinstance(error, NotRegular) else None
        raise SettingsInvalid(
            f"there is no settings file {path}" + (f": it {reason}" if reason else ""),
            hint="corral config path lists where it is searched",
        ) from error
    return found.absolute()


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a directory that may not be entered
        return False


def _warn_unless_trusted(path: Path) -> Path:
    if reason := _doubts(path):
        warn(f"the settings file {path} may have been changed by others: {reason}")
    return path


def _doubts(path: Path) -> str | None:
    try:
        return ownership.first_doubt(ownership.read_access(path), *ownership.this_user())
    except OSError as error:
        return f"its permissions cannot be read ({error.strerror})"


def search_path(config_dir: Path) -> tuple[Path, ...]:
    """Return the paths at which the file is searched, in this order."""
    return (Path(FILE_NAME), config_dir / FILE_NAME)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def restart_changes(began_with: Settings, after: Settings) -> Iterator[tuple[str, object]]:
    """Yield each dotted key that only a restart of the daemon applies, with its old value."""
    kept: dict[str, object] = {
        name: getattr(after.proxy, name) for name in ("default_model", "prompt_rules")
    }
    if began_with.proxy.tls and after.proxy.tls:  # new connections use the new files
        kept["tls"] = after.proxy.tls
    tables = {
        "proxy": (began_with.proxy.model_copy(update=kept), after.proxy),
        "jobs": (began_with.jobs, after.jobs),
    }
    for name, (was, now) in tables.items():
        old, new = (flatten(table.model_dump(mode="json"), f"{name}.") for table in (was, now))
        for key in sorted(old | new):
            if old.get(key) != new.get(key):
                yield key, old.get(key)


def _merge_tables(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merge_tables(under[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(under.get(key), Mapping)
    }
    return {**under, **over, **both}


def _environment() -> dict[str, Any]:
    """Read the variables `CORRAL_…`. Raises SettingsInvalid: a table is not JSON or too deep."""
    prefixes = tuple(f"{_PREFIX}{field}".upper() for field in Settings.model_fields)
    if not any(name.upper().startswith(prefixes) for name in os.environ):
        return {}
    # It takes 1.5 MB of memory and 20 ms, and most machines set no such variable.
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError  # noqa: PLC0415

    settings = cast("type[BaseSettings]", Settings)  # whose fields alone are read
    try:
        found = EnvSettingsSource(settings, env_prefix=_PREFIX, env_nested_delimiter="__")()
    except (SettingsError, ValueError, RecursionError) as error:
        # Source: pydantic-settings, sources/base.py: error parsing value for field "proxy" from …
        field = re.search(r'field "(\w+)"', str(error))
        name = f"CORRAL_{field[1].upper()}" if field else "CORRAL_…"
        raise SettingsInvalid(
            f"the variable {name} cannot be read: {error.__cause__ or error}",
            hint="a table is set by JSON, or key by key: CORRAL_PROXY__LISTEN=HOST:PORT",
        ) from error
    if is_deeper(found, DEPTH_MAX):
        raise SettingsInvalid(f"a variable CORRAL_… is nested deeper than {DEPTH_MAX} levels")
    return found


def _resolve_paths(settings: Settings, base: Path) -> Settings:
    """Join relative paths to `base`, resolve references, and complete restart policies."""
    joined: Settings = _join_paths(settings, base)

    def locate(path: Path) -> tuple[Path, Mapping[str, str]]:
        if not model_lookup.is_reference(path):
            return path, {}
        where = directories()
        found = model_lookup.find(path, roots(where.models, joined.models_dirs), where.cache)
        return (path, {}) if found is None or found.problem else (found.path, found.flags)

    def resolve_model(name: str, model: ModelSettings) -> ModelSettings:
        path, beside = locate(model.path)
        trial = model.trial and model.trial.model_copy(
            update={"flags": absolute(model.trial.flags, base)}
        )
        update = {
            "path": path,
            "flags": {**beside, **absolute(model.flags, base)},
            "trial": trial,
            "draft": locate(model.draft)[0] if isinstance(model.draft, Path) else model.draft,
            "restart": settings.restart_policy(name),
        }
        return model.model_copy(update=update)

    models = {name: resolve_model(name, model) for name, model in joined.models.items()}
    return joined.model_copy(update={"models": models})


def _join_paths(value: Any, base: Path) -> Any:
    """Join every relative path in settings to `base`; references to models stay."""
    match value:
        case Path():
            return value if model_lookup.is_reference(value) else base / value
        case BaseModel():
            joined = {name: _join_paths(member, base) for name, member in value}
            # Only these, because a copied key counts as set.
            update = {name: new for name, new in joined.items() if new != getattr(value, name)}
            return value.model_copy(update=update)
        case tuple():
            return tuple(_join_paths(member, base) for member in value)
        case dict():
            return {key: _join_paths(member, base) for key, member in value.items()}
    return value


def _current_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed; relative paths lead nowhere
        return Path("/")
