"""Resolves words of the command line to settings and models, and completes them in the shell.

A word is a model of `corral.toml`, a stored model (`corral model list`), or the path of a GGUF
file; the last two need no settings file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

from supervisor.builds.installed import installed_builds
from supervisor.daemon.control_messages import DaemonStatus
from supervisor.errors import CorralError, ModelInvalid, NoSuchModel, SettingsInvalid, did_you_mean
from supervisor.models import file_names, metadata, reference
from supervisor.models import pinned as pinned_module
from supervisor.plan import profile
from supervisor.settings.load import Loaded, load, merge
from supervisor.settings.stored_models import StoredModels, table_of
from supervisor.settings.tables import HookName
from supervisor.system.files import expand_home, is_regular
from supervisor.system.paths import Directories, directories

_NAMES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Targets:
    """The settings to run with, and the named models."""

    loaded: Loaded  # the settings, including models that only the command line names
    names: tuple[str, ...]  # the named models, or all models of the settings
    added: tuple[str, ...]  # words for models that the settings do not have, valid in any directory


def choose(
    words: Sequence[str],
    config: Path | None,
    where: Directories,
    listen: str | None = None,
    content: bytes | None = None,
) -> Targets:
    """Read the settings, or `content` in place of their file, with models that the words add."""
    overrides: dict[str, Any] = {"proxy": {"listen": listen}} if listen else {}
    loaded = load(config, config_dir=where.config, overrides=overrides, content=content)
    known, stored = loaded.settings.models, StoredModels(loaded.settings, where)
    taken = {name: model.path for name, model in known.items()}
    added: dict[str, _Target] = {}
    for word in words:
        if word not in known:
            added[word] = _make_name_unique(_target(word, where, known, stored), taken)
            taken[added[word].name] = added[word].path
    if added:
        overrides["models"] = {model.name: model.table for model in added.values()}
        loaded = load(config, config_dir=where.config, overrides=overrides, content=content)
    loaded = stored.with_stored_models(loaded)
    if not (loaded.settings.models or loaded.settings.nodes):
        raise SettingsInvalid(
            "no model is configured",
            hint="corral start FILE.gguf serves a file; corral model get smollm2 fetches one",
        )
    names = tuple(added[word].name if word in added else word for word in words)
    added_words = tuple(model.word for model in added.values())
    return Targets(loaded, names or tuple(loaded.settings.models), added_words)


def additional_models(
    words: Sequence[str], status: DaemonStatus, where: Directories
) -> dict[str, Mapping[str, Any]]:
    """Return `[models.NAME]` of models that a running daemon does not have, loaded on request.

    Raises NoSuchModel, ModelInvalid, or SettingsInvalid if another model has the same name.
    """
    config = status.config
    settings = (load(Path(config), config_dir=where.config) if config else merge({}, None)).settings
    taken = {model.name: Path(model.path) for model in status.models}
    stored = StoredModels(settings, where)
    tables: dict[str, Mapping[str, Any]] = {}
    for word in words:
        found = _make_name_unique(_target(word, where, taken, stored), taken)
        if not found.path.is_file():
            raise ModelInvalid(
                f"model file {found.path} not found" + _near_file(found.path),
                hint="corral model list shows the models of this machine",
            )
        taken[found.name] = found.path
        tables[found.name] = {**found.table, "preload": False}
    return tables


@dataclass(frozen=True, slots=True)
class _Target:
    """A model that the settings do not have; `word` is valid in any directory."""

    word: str
    name: str
    table: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return Path(self.table["path"])


def _target(
    word: str, where: Directories, known: Mapping[str, object], stored: StoredModels
) -> _Target:
    path = expand_home(Path(word)).absolute()
    if path.is_dir() and ("/" in word or word.endswith(".gguf")):
        raise _directory_error(word, path)
    if word.endswith(".gguf") or ("/" in word and is_regular(path)):
        return _Target(str(path), name_of(Path(word)), {"path": str(path)})
    pins = pinned_module.pins()
    if word in pins and pinned_module.is_fetched(pins[word], where.models):
        return _Target(word, word, {"path": str(pins[word].path(where.models))})
    if found := stored.find(word):
        return _Target(found.name, found.id, table_of(found))
    if word in pins:
        raise ModelInvalid(f"{word} was not fetched yet", hint=f"corral model get {word}")
    if path.is_dir():
        raise _directory_error(word, path)
    if "/" in word:
        raise ModelInvalid(
            f"model file {path} not found, and no stored model is named {word}",
            hint=f"{_fetch_hint(word)}corral model list shows the models of this machine",
        )
    names = list(dict.fromkeys([*known, *pins, *stored.names]))
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    raise NoSuchModel(
        f"no model is named {word!r}, and it is not the path of a GGUF file"
        + (did_you_mean(word, names) or _near_file(path)),
        hint=f"available: {', '.join(names[:_NAMES_MAX])}{more}",
    )


def _make_name_unique(target: _Target, taken: Mapping[str, Path]) -> _Target:
    """Prefix the name with the directory if it is taken; raises SettingsInvalid if both are."""
    path = target.path
    longer = name_of(Path(f"{path.parent.name}-{target.name}"))
    for name in (target.name, longer):
        if taken.get(name, path) == path:
            return replace(target, name=name)
    raise SettingsInvalid(
        f"{path} would be served as {longer}, which is {taken[longer]}",
        hint=f"give it a name in corral.toml: corral config set models.NAME.path {path}",
    )


def _near_file(path: Path) -> str:
    try:
        return did_you_mean(path.name, (file.name for file in path.parent.glob("*.gguf")))
    except OSError:  # a directory that may not be read
        return ""


def _directory_error(word: str, path: Path) -> ModelInvalid:
    try:
        files = sorted(file for file in path.glob("*.gguf") if not metadata.is_later_shard(file))
    except OSError:  # a directory that may not be read
        files = []
    models = [str(Path(word, file.name)) for file in files if not file.name.startswith("mmproj")]
    hint = "corral model list shows the models of this machine"
    if models:
        others = f"; it has {len(models) - 1} more" if len(models) > 1 else ""
        hint = f"corral start {shlex.quote(models[0])} serves the GGUF file in it{others}"
    return ModelInvalid(f"{path} is a directory, not a GGUF file", hint=hint)


def _fetch_hint(word: str) -> str:
    try:
        return f"corral model get {reference.parse_reference(word)} fetches it; "
    except NoSuchModel:
        return ""


def name_of(path: Path) -> str:
    return file_names.model_name(path.name)


_FILES_MAX: Final = 1000

Kind = Literal[
    "model", "profile", "engine", "key", "setting", "client", "request", "any request", "hook"
]


def complete_word(kind: Kind, prefix: str) -> list[str]:
    """Return the words of a kind with this prefix; none if the settings cannot be read."""
    files = set(islice(_files(prefix), _FILES_MAX)) if kind == "model" and "/" in prefix else set()
    try:
        return sorted({word for word in _WORDS[kind]() if word.startswith(prefix)} | files)
    except CorralError:
        return sorted(files)


def _files(prefix: str) -> Iterator[str]:
    """Yield GGUF files and directories with this prefix."""
    directory, _, name = prefix.rpartition("/")
    try:
        entries = tuple(islice(os.scandir(expand_home(Path(directory or "/"))), _FILES_MAX))
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
    for name, pin in pinned_module.pins().items():
        if pinned_module.is_fetched(pin, where.models):
            yield name
    for name, model in load(config_dir=where.config).settings.models.items():
        yield name
        yield from (f"{name}:{variant}" for variant in model.variants)
        yield from (f"{name}+{adapter}" for adapter in model.loras)


def _words_of(target: str) -> Callable[[], Iterable[str]]:
    """Return a function of another module of this package, which is imported when it is called."""
    module, _, name = target.partition(".")

    def words() -> Iterable[str]:
        found: Iterable[str] = getattr(import_module(f"supervisor.cli.{module}"), name)()
        return found

    return words


def _settings() -> Iterator[str]:
    """Yield the keys of settings; keys of named tables once for each name in the file."""
    from supervisor.settings.reference import ANY, settings_reference

    settings = load().settings
    for setting in settings_reference():
        key = setting.key
        if ANY not in key:
            yield ".".join(key)
        elif key.count(ANY) == 1:
            names: Mapping[str, object] = getattr(settings, key[0])
            yield from (".".join((key[0], name, *key[2:])) for name in names)


_WORDS: Final[Mapping[Kind, Callable[[], Iterable[str]]]] = {
    "model": _models,
    "profile": lambda: profile.names(directories().profiles),
    "engine": lambda: (build.name for build in installed_builds(directories().engines)),
    "key": _words_of("key.names"),
    "setting": _settings,
    "client": _words_of("connect.names"),
    "request": _words_of("requests.running_ids"),
    "any request": _words_of("requests.latest_ids"),
    "hook": lambda: get_args(HookName),
}
