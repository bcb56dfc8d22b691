"""Resolves the words of the command line to settings and models.

A word is a model of `corral.toml`, a stored one (`corral model list`), or the path of a GGUF file;
the last two need no settings file.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from supervisor.commands.stored_models import StoredModels, table_of
from supervisor.control.messages import DaemonStatus
from supervisor.errors import ModelInvalid, NoSuchModel, SettingsInvalid, did_you_mean
from supervisor.gguf import metadata
from supervisor.host import download
from supervisor.host.files import expanded, is_regular
from supervisor.host.paths import Directories
from supervisor.hub import file_names, reference
from supervisor.settings.load import Loaded, load, merge

_NAMES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Targets:
    """The settings to run with, and the models that were named.

    Attributes:
        loaded: The settings, with the models that only the command line names.
        names: The models named, or all of the settings.
        added: The words for models that the settings do not have, valid in any directory.
    """

    loaded: Loaded
    names: tuple[str, ...]
    added: tuple[str, ...]


def choose(
    words: Sequence[str], config: Path | None, where: Directories, listen: str | None = None
) -> Targets:
    overrides: dict[str, Any] = {"proxy": {"listen": listen}} if listen else {}
    loaded = load(config, config_dir=where.config, overrides=overrides)
    known, stored = loaded.settings.models, StoredModels(loaded.settings, where)
    taken = {name: model.path for name, model in known.items()}
    added: dict[str, _Target] = {}
    for word in words:
        if word not in known:
            added[word] = _named_apart(_target(word, where, known, stored), taken)
            taken[added[word].name] = added[word].path
    if added:
        overrides["models"] = {one.name: one.table for one in added.values()}
        loaded = load(config, config_dir=where.config, overrides=overrides)
    loaded = stored.served(loaded)
    if not (loaded.settings.models or loaded.settings.nodes):
        raise SettingsInvalid(
            "no model is configured",
            hint="corral start FILE.gguf serves a file; corral model get smollm2 fetches one",
        )
    names = tuple(added[word].name if word in added else word for word in words)
    return Targets(
        loaded,
        names=names or tuple(loaded.settings.models),
        added=tuple(one.word for one in added.values()),
    )


def additional_models(
    words: Sequence[str], status: DaemonStatus, where: Directories
) -> dict[str, Mapping[str, Any]]:
    """Return `[models.NAME]` of models that a running daemon does not have, loaded on request.

    Raises:
        NoSuchModel, ModelInvalid: A word names no model.
        SettingsInvalid: Its name is another model's.
    """
    config = status["config"]
    settings = (load(Path(config), config_dir=where.config) if config else merge({}, None)).settings
    taken = {model["name"]: Path(model["path"]) for model in status["models"]}
    stored = StoredModels(settings, where)
    tables: dict[str, Mapping[str, Any]] = {}
    for word in words:
        found = _named_apart(_target(word, where, taken, stored), taken)
        if not found.path.is_file():
            raise ModelInvalid(
                f"model file {found.path} not found" + _near_file(found.path),
                hint="corral model list shows the models of this machine",
            )
        taken[found.name] = found.path
        tables[found.name] = {**found.table, "preload": False}
    return tables


def settings_reader(
    targets: Targets, where: Directories, listen: str | None
) -> Callable[[], Loaded]:
    """Return a function that reads the same settings file and added models again.

    Words that chose among the models of the file are dropped: the file may have others by now.
    """

    def read() -> Loaded:
        return choose(targets.added, targets.loaded.path, where, listen).loaded

    return read


@dataclass(frozen=True, slots=True)
class _Target:
    """A model that the settings do not have.

    Attributes:
        word: What names it in any directory.
        table: `[models.NAME]`.
    """

    word: str
    name: str
    table: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return Path(self.table["path"])


def _target(
    word: str, where: Directories, known: Mapping[str, object], stored: StoredModels
) -> _Target:
    path = expanded(Path(word)).absolute()
    if path.is_dir() and ("/" in word or word.endswith(".gguf")):
        raise _directory(word, path)
    if word.endswith(".gguf") or ("/" in word and is_regular(path)):
        return _Target(str(path), name_of(Path(word)), {"path": str(path)})
    pins = download.pins()
    if word in pins and download.is_fetched(pins[word], where.models):
        return _Target(word, word, {"path": str(pins[word].path(where.models))})
    if found := stored.find(word):
        return _Target(found.name, found.id, table_of(found))
    if word in pins:
        raise ModelInvalid(f"{word} was not fetched yet", hint=f"corral model get {word}")
    if path.is_dir():
        raise _directory(word, path)
    if "/" in word:
        raise ModelInvalid(
            f"model file {path} not found, and no stored model is named {word}",
            hint=f"{_fetching(word)}corral model list shows the available models",
        )
    names = list(dict.fromkeys([*known, *pins, *stored.names]))
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    raise NoSuchModel(
        f"no model is named {word!r}, and it is not the path of a GGUF file"
        + (did_you_mean(word, names) or _near_file(path)),
        hint=f"available: {', '.join(names[:_NAMES_MAX])}{more}",
    )


def _named_apart(target: _Target, taken: Mapping[str, Path]) -> _Target:
    """Put the directory before a name that a model of another file has.

    Raises:
        SettingsInvalid: Another model has that name too.
    """
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


def _directory(word: str, path: Path) -> ModelInvalid:
    try:
        files = sorted(file for file in path.glob("*.gguf") if not metadata.is_later_shard(file))
    except OSError:  # a directory that may not be read
        files = []
    models = [str(Path(word, file.name)) for file in files if not file.name.startswith("mmproj")]
    hint = "corral model list shows the models of this machine"
    if models:
        others = f"; {len(models) - 1} more are there" if len(models) > 1 else ""
        hint = f"corral start {shlex.quote(models[0])} serves the GGUF file in it{others}"
    return ModelInvalid(f"{path} is a directory, not a GGUF file", hint=hint)


def _fetching(word: str) -> str:
    try:
        return f"corral model get {reference.parse(word)} fetches it; "
    except NoSuchModel:
        return ""


def name_of(path: Path) -> str:
    """Return a model name for a file."""
    return file_names.model_name(path.name)
