"""`corral key add|list|remove`: the file of API keys.

The file is written whole, beside the old one and then in its place, so that a running daemon reads
either. A key that somebody has written into it as it is becomes its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from proxy.auth.keys_file import Key, parse_keys, render_keys
from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.host.files import write_atomic
from supervisor.host.paths import directories
from supervisor.output import CommandResult, table
from supervisor.proxy_adapter.settings import api_keys, explained
from supervisor.settings.load import Loaded, load

_FILE_NAME: Final = "keys.toml"
_RANDOM_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class Wish:
    """The key that is wanted; the fields are those of `proxy.auth.keys_file.Key`."""

    name: str
    models: tuple[str, ...] | None
    max_in_flight: int | None
    requests_per_minute: int | None
    priority: Literal["interactive", "batch"]

    def granted(self, secret: str) -> Key:
        """Return the key that this secret is."""
        return Key(
            self.name,
            hashlib.sha256(secret.encode()).digest(),
            self.max_in_flight,
            self.requests_per_minute,
            frozenset(self.models) if self.models is not None else None,
            self.priority,
        )


def add(wish: Wish, config: Path | None) -> CommandResult:
    """Make a key, and show it this once.

    Raises:
        SettingsInvalid: There is a key of that name, the name is none, or the file is wrong.
        AccessDenied: The file cannot be written.
    """
    loaded = _loaded(config)
    path = _path(loaded)
    keys = _keys(path)
    if any(key.name == wish.name for key in keys):
        raise SettingsInvalid(
            f"there is a key {wish.name} in {path} already",
            hint=f"corral key remove {wish.name} takes it back",
        )
    secret = f"corral-{secrets.token_hex(_RANDOM_BYTES)}"
    _write(path, [*keys, wish.granted(secret)])
    data = {"name": wish.name, "key": secret, "path": str(path)}
    return CommandResult(data, secret, tuple(_notes(wish, loaded, path)))


def list_keys(config: Path | None) -> CommandResult:
    """List the keys by name, and what each may."""
    path = _path(_loaded(config))
    keys = _keys(path)
    rows = [
        (
            key.name,
            ", ".join(sorted(key.models)) if key.models is not None else "all",
            str(key.max_in_flight or "-"),
            str(key.requests_per_minute or "-"),
            key.priority,
        )
        for key in keys
    ]
    data = [
        {
            "name": key.name,
            "models": sorted(key.models) if key.models is not None else None,
            "max_in_flight": key.max_in_flight,
            "requests_per_minute": key.requests_per_minute,
            "priority": key.priority,
        }
        for key in keys
    ]
    head = ("NAME", "MODELS", "AT ONCE", "A MINUTE", "LANE")
    text = table(head, rows) if rows else f"no keys in {path}; corral key add NAME makes one"
    return CommandResult(data, text)


def remove(name: str, config: Path | None) -> CommandResult:
    """Take a key back.

    Raises:
        SettingsInvalid: There is no key of that name, or the file is wrong.
        AccessDenied: The file cannot be written.
    """
    path = _path(_loaded(config))
    keys = _keys(path)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        names = ", ".join(key.name for key in keys) or "none"
        raise SettingsInvalid(f"there is no key {name} in {path}", hint=f"its keys are: {names}")
    _write(path, left)
    notes = () if left else (f"{path} has no key any more: nobody may ask",)
    return CommandResult({"name": name, "path": str(path)}, f"removed {name}", notes)


def _loaded(config: Path | None) -> Loaded:
    return load(config, config_dir=directories().config)


def _path(loaded: Loaded) -> Path:
    return loaded.settings.proxy.api_keys_file or directories().config / _FILE_NAME


def _keys(path: Path) -> tuple[Key, ...]:
    return api_keys(path) if os.path.lexists(path) else ()


def _notes(wish: Wish, loaded: Loaded, path: Path) -> Iterable[str]:
    yield f"this is the only time it is shown; {path} keeps its SHA-256"
    if loaded.settings.proxy.api_keys_file is None:
        yield f'no key is asked for until [proxy] says: api_keys_file = "{path}"'
    models = loaded.settings.models
    known = {*models, *(alias for model in models.values() for alias in model.aliases)}
    for name in sorted(set(wish.models or ()) - known):
        yield f"there is no model {name} in the settings"


def _write(path: Path, keys: Iterable[Key]) -> None:
    """Put a file of keys in place, whole or not at all, closed to everybody else.

    Raises:
        SettingsInvalid: A key has a name or a model that the file cannot hold.
        AccessDenied: The directory cannot be written.
    """
    text = render_keys(keys)
    with explained():
        parse_keys(text.encode(), path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise AccessDenied(f"cannot write {path}: {error.strerror}") from error
