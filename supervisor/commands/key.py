"""`corral key add|list|remove`: the file of API keys.

The file is replaced as a whole, so a running daemon reads the old or the new one. Keys that were
written into it by hand are replaced by their SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Final

from proxy.auth.keys_file import FILE_NAME, Key, parse_keys, render_keys
from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.host.files import write_atomic
from supervisor.host.paths import directories
from supervisor.output import CommandResult, table
from supervisor.proxy_adapter.settings import api_keys, explained
from supervisor.settings.load import Loaded, load
from supervisor.settings.types import CATCH_ALL

_RANDOM_BYTES: Final = 24


def add(wanted: Key, config: Path | None) -> CommandResult:
    """Create a key with a random secret (the digest of `wanted` is ignored), and show it once."""
    loaded = _loaded(config)
    path = _path(loaded)
    keys = _keys(path)
    if any(key.name == wanted.name for key in keys):
        raise SettingsInvalid(
            f"{path} already has a key {wanted.name}",
            hint=f"corral key remove {wanted.name} removes it",
        )
    secret = f"corral-{secrets.token_hex(_RANDOM_BYTES)}"
    _write(path, [*keys, replace(wanted, digest=hashlib.sha256(secret.encode()).digest())])
    data = {"name": wanted.name, "key": secret, "path": str(path)}
    return CommandResult(data, secret, tuple(_notes(wanted, loaded, path)))


def add_known(known: Sequence[str], path: Path) -> tuple[str, ...]:
    """Add keys that clients have already; return the names of those that were not there."""
    keys = list(_keys(path))
    names = (f"imported-{number}" for number in count(1))
    added = list[str]()
    for secret in known:
        digest = hashlib.sha256(secret.encode()).digest()
        if all(key.digest != digest for key in keys):
            taken = {key.name for key in keys}
            keys.append(Key(next(name for name in names if name not in taken), digest))
            added.append(keys[-1].name)
    if added:
        _write(path, keys)
    return tuple(added)


def list_keys(config: Path | None) -> CommandResult:
    path = _path(_loaded(config))
    keys = _keys(path)
    rows = [
        (
            key.name,
            ", ".join(sorted(key.models)) if key.models is not None else "all",
            str(key.max_in_flight or "-"),
            str(key.requests_per_minute or "-"),
            str(key.tokens_per_minute or "-"),
            str(key.tokens_per_day or "-"),
            str(key.max_context or "-"),
            key.priority,
            "yes" if key.admin else "-",
        )
        for key in keys
    ]
    limits = ("IN FLIGHT", "PER MINUTE", "TOKENS/MIN", "TOKENS/DAY", "CONTEXT")
    head = ("NAME", "MODELS", *limits, "PRIORITY", "ADMIN")
    text = table(head, rows) if rows else f"no keys in {path}; corral key add NAME creates one"
    return CommandResult([_data(key) for key in keys], text)


def names(config: Path | None) -> tuple[str, ...]:
    return tuple(key.name for key in _keys(_path(_loaded(config))))


def remove(name: str, config: Path | None) -> CommandResult:
    path = _path(_loaded(config))
    keys = _keys(path)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        names = ", ".join(key.name for key in keys) or "none"
        raise SettingsInvalid(f"{path} has no key {name}", hint=f"its keys are: {names}")
    _write(path, left)
    notes = () if left else (f"{path} is now empty: all requests will be rejected",)
    return CommandResult({"name": name, "path": str(path)}, f"removed {name}", notes)


def _data(key: Key) -> dict[str, object]:
    fields = asdict(key)
    del fields["digest"]
    return fields | {"models": sorted(key.models) if key.models is not None else None}


def _loaded(config: Path | None) -> Loaded:
    return load(config, config_dir=directories().config)


def _path(loaded: Loaded) -> Path:
    return loaded.settings.proxy.api_keys_file or directories().config / FILE_NAME


def _keys(path: Path) -> tuple[Key, ...]:
    return api_keys(path) if os.path.lexists(path) else ()


def _notes(key: Key, loaded: Loaded, path: Path) -> Iterable[str]:
    yield f"the key is shown only now; {path} stores its SHA-256"
    if loaded.settings.proxy.api_keys_file is None:
        yield f'no key is required until [proxy] has: api_keys_file = "{path}"'
    models = loaded.settings.models
    known = {*models, *(alias for model in models.values() for alias in model.aliases)}
    for name in sorted((key.models or set()) - (known - {CATCH_ALL})):
        yield f"the settings have no model {name}"


def _write(path: Path, keys: Iterable[Key]) -> None:
    text = render_keys(keys)
    with explained():
        parse_keys(text.encode(), path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise AccessDenied(f"cannot write {path}: {error.strerror}") from error
