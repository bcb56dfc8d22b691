"""Implements `corral key`, `slots new-key` and `hooks`.

Files of keys are replaced atomically, so a running daemon reads the old or the new file. API keys
that were written into the file by hand are replaced by their SHA-256.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Final, get_args

from proxy.auth.keys_file import FILE_NAME, Key, parse_keys, render_keys
from supervisor.backend.proxy_settings import api_keys, as_settings_invalid
from supervisor.errors import SettingsInvalid, access_denied
from supervisor.output import CommandResult, colored, table
from supervisor.service import hook_commands
from supervisor.settings.load import Loaded, load
from supervisor.settings.tables import CATCH_ALL, HookName
from supervisor.slot_store.encryption import new_key, parse_key_ring, read_key_ring, with_newest
from supervisor.system.files import write_atomic
from supervisor.system.paths import directories

_RANDOM_BYTES: Final = 24


def add(wanted: Key, config: Path | None) -> CommandResult:
    """Create a key with a random secret, and show it once; the digest of `wanted` is ignored."""
    loaded = load(config)
    path = _path(loaded)
    keys = _keys(path)
    if any(key.name == wanted.name for key in keys):
        raise SettingsInvalid(
            f"{path} already has a key {wanted.name}",
            hint=f"corral key remove {wanted.name} removes it",
        )
    secret = f"corral-{secrets.token_hex(_RANDOM_BYTES)}"
    _write_keys(path, [*keys, replace(wanted, digest=hashlib.sha256(secret.encode()).digest())])
    data = {"name": wanted.name, "key": secret, "path": str(path)}
    return CommandResult(data, secret, tuple(_key_notes(wanted, loaded, path)))


def add_known(known: Sequence[str], path: Path) -> tuple[str, ...]:
    """Add keys that clients already use; return the names of the new ones."""
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
        _write_keys(path, keys)
    return tuple(added)


def list_keys(config: Path | None) -> CommandResult:
    path = _path(load(config))
    keys = _keys(path)
    limits = ("IN FLIGHT", "PER MINUTE", "TOKENS/MIN", "TOKENS/DAY", "CONTEXT")
    head = ("NAME", "MODELS", *limits, "PRIORITY", "ADMIN", "TOOLS")
    rows = [*map(_row, keys)]
    text = table(head, rows) if rows else f"no keys in {path}; corral key add NAME creates one"
    data = [
        {name: value for name, value in asdict(key).items() if name != "digest"}
        | {"models": sorted(key.models) if key.models is not None else None}
        for key in keys
    ]
    return CommandResult(data, text)


def _row(key: Key) -> tuple[object, ...]:
    models = "all" if key.models is None else sorted(key.models)
    tokens = (key.tokens_per_minute, key.tokens_per_day, key.max_context)
    limits = (key.max_in_flight, key.requests_per_minute, *tokens)
    rights = ("yes" if has_right else None for has_right in (key.admin, key.tools))
    return key.name, models, *limits, key.priority, *rights


def names() -> Iterator[str]:
    return (key.name for key in _keys(_path(load(None))))


def remove(name: str, config: Path | None) -> CommandResult:
    path = _path(load(config))
    keys = _keys(path)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        names = ", ".join(key.name for key in keys) or "none"
        raise SettingsInvalid(f"{path} has no key {name}", hint=f"its keys are: {names}")
    _write_keys(path, left)
    notes = () if left else (f"{path} is now empty: all requests will be rejected",)
    return CommandResult({"name": name, "path": str(path)}, f"removed {name}", notes)


def _path(loaded: Loaded) -> Path:
    return loaded.settings.proxy.api_keys_file or directories().config / FILE_NAME


def _keys(path: Path) -> tuple[Key, ...]:
    return api_keys(path) if os.path.lexists(path) else ()


def _key_notes(key: Key, loaded: Loaded, path: Path) -> Iterable[str]:
    yield f"the key is shown only now; {path} stores its SHA-256"
    if loaded.settings.proxy.api_keys_file is None:
        yield f'no key is required until [proxy] has: api_keys_file = "{path}"'
    models = loaded.settings.models
    known = {*models, *(alias for model in models.values() for alias in model.aliases)}
    for name in sorted((key.models or set()) - (known - {CATCH_ALL})):
        yield f"the settings have no model {name}"


def _write_keys(path: Path, keys: Iterable[Key]) -> None:
    text = render_keys(keys)
    with as_settings_invalid():
        parse_keys(text.encode(), path)
    _write(path, text)


def _write(path: Path, text: str) -> None:
    with access_denied(f"cannot write {path}"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, text)


_FILE_NAME: Final = "slots.key"


def new(file: Path | None, config: Path | None) -> CommandResult:
    """Create a file with a random key, or put one before the keys of a file; shows no key."""
    used = load(config).settings.supervisor.slots_key_file
    path = file or used or directories().config / _FILE_NAME
    older, text, key = 0, "", new_key()
    if os.path.lexists(path):
        older, text = len(read_key_ring(path)), path.read_text("ascii")
    text = with_newest(key, text)
    parse_key_ring(text.encode(), path)
    _write(path, text)
    data = {"path": str(path), "key_id": key.id, "older_keys": older}
    shown = f"{path} has a new key, {key.id}"
    return CommandResult(data, shown, tuple(_key_ring_notes(path, older, is_used=path == used)))


def _key_ring_notes(path: Path, older: int, *, is_used: bool) -> Iterator[str]:
    if not is_used:
        yield f'nothing is encrypted until [supervisor] has: slots_key_file = "{path}"'
    else:
        yield "a running daemon encrypts with it after corral reload"
    if older:
        yield f"its {older} older keys still decrypt conversations saved with them"
    yield "without its key, a saved conversation is computed again"


_HOOKS: tuple[HookName, ...] = get_args(HookName)
_NODE = "node"
_MODEL = "chat"


def list_hooks(config: Path | None) -> CommandResult:
    """List the hooks that have commands; works without a daemon."""
    hooks = load(config).settings.hooks
    found = {hook: hooks.commands(hook) for hook in _HOOKS if hooks.commands(hook)}
    rows = [(hook, json.dumps(words)) for hook, commands in found.items() for words in commands]
    text = table(("HOOK", "COMMAND"), rows) if rows else _no_hooks()
    return CommandResult(found, text)


def try_hook(hook: str, config: Path | None) -> CommandResult:
    """Run the commands of a hook with an example event; exit code 1 if one fails."""
    if hook not in _HOOKS:
        raise SettingsInvalid(f"there is no hook {hook}", hint=f"there are {', '.join(_HOOKS)}")
    loaded = load(config)
    commands = loaded.settings.hooks.commands(hook)
    if not commands:
        raise SettingsInvalid(f"hooks.{hook} has no command", hint=_no_hooks(hook))
    settings, directory = loaded.settings, hook_commands.hook_directory(loaded.path)
    model, node = next(iter(settings.models), _MODEL), next(iter(settings.nodes), _NODE)
    event = hook_commands.example(hook, datetime.now(tz=UTC), model, node)

    async def run(words: tuple[str, ...]) -> hook_commands.HookRun:
        command = hook_commands.hook_command(words, event, directory)
        return await hook_commands.run_command(command, event.as_json(), settings.hooks.timeout_s)

    runs = [asyncio.run(run(words)) for words in commands]
    lines = [f"{colored('event', 'dim')} {event.as_json().decode().strip()}"]
    for words, ran in zip(commands, runs, strict=True):
        lines += ["", json.dumps(words), *(f"  {line}" for line in ran.output.splitlines())]
        verdict = colored(f"failed: {ran.problem}", "red") if ran.problem else "exited with code 0"
        lines.append(f"{verdict} after {ran.duration_s or 0:.2f} s")
    data = [{"command": words, **asdict(ran)} for words, ran in zip(commands, runs, strict=True)]
    exit_code = 1 if any(ran.problem for ran in runs) else 0
    return CommandResult(data, "\n".join(lines), exit_code=exit_code)


def _no_hooks(hook: str = "model_loaded") -> str:
    return f'no hook is set; in corral.toml: [hooks] {hook} = ["notify-send", "llama-corral"]'
