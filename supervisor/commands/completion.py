"""What the shell offers for a word: names of models, builds and such, and keys of settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, get_args

from supervisor.engines.installed import installed_builds
from supervisor.errors import CorralError
from supervisor.flags import profile
from supervisor.host import download
from supervisor.host.files import expanded
from supervisor.host.paths import directories
from supervisor.settings.hooks import HookName
from supervisor.settings.load import load
from supervisor.settings.schema import Settings

_FILES_MAX: Final = 1000

Kind = Literal[
    "model", "profile", "engine", "key", "setting", "client", "request", "any request", "hook"
]


def offered(kind: Kind, begun: str) -> list[str]:
    """Return the words of a kind that begin so; none where the settings cannot be read."""
    files = set(islice(_files(begun), _FILES_MAX)) if kind == "model" and "/" in begun else set()
    try:
        return sorted({word for word in _WORDS[kind]() if word.startswith(begun)} | files)
    except CorralError:
        return sorted(files)


def _files(begun: str) -> Iterator[str]:
    """Yield GGUF files and directories that begin so."""
    directory, _, name = begun.rpartition("/")
    try:
        entries = tuple(islice(os.scandir(expanded(Path(directory or "/"))), _FILES_MAX))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name):
            if entry.is_dir():
                yield f"{directory}/{entry.name}/"
            elif entry.name.endswith(".gguf"):
                yield f"{directory}/{entry.name}"


def _models() -> Iterator[str]:
    where = directories()
    yield from (
        name for name, pin in download.pins().items() if download.is_fetched(pin, where.models)
    )
    for name, model in load(config_dir=where.config).settings.models.items():
        yield name
        yield from (f"{name}:{variant}" for variant in model.variants)
        yield from (f"{name}+{adapter}" for adapter in model.loras)


def _profiles() -> Iterator[str]:
    yield from profile.names(directories().profiles)


def _engines() -> Iterator[str]:
    yield from (build.name for build in installed_builds(directories().engines))


def _keys() -> Iterator[str]:
    from supervisor.commands.key import names

    yield from names(None)


def _clients() -> Iterator[str]:
    from supervisor.connect.clients import CLIENTS

    yield from (client.name for client in CLIENTS)


def _requests() -> Iterator[str]:
    from supervisor.control.client import Client

    yield from (one["id"] for one in Client(directories().control_socket).requests())


def _all_requests() -> Iterator[str]:
    from supervisor.commands.past_requests import latest_ids

    yield from latest_ids()


def _settings() -> Iterator[str]:
    """Yield the keys of settings, once for each name that the file has."""
    from supervisor.settings.reference import ANY, settings_reference

    settings = load(config_dir=directories().config).settings
    for one in settings_reference():
        key = one.key
        if ANY not in key:
            yield ".".join(key)
        elif key.count(ANY) == 1:
            yield from (".".join((key[0], name, *key[2:])) for name in _named(settings, key[0]))


def _named(settings: Settings, table: str) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(settings, table)
    return found


_WORDS: Final[Mapping[Kind, Callable[[], Iterator[str]]]] = MappingProxyType(
    {
        "model": _models,
        "profile": _profiles,
        "engine": _engines,
        "key": _keys,
        "setting": _settings,
        "client": _clients,
        "request": _requests,
        "any request": _all_requests,
        "hook": lambda: iter(get_args(HookName)),
    }
)
