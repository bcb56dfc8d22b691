"""Resolves the words of the command line to settings and models.

A word is a model of `corral.toml`, a stored one (`corral model list`), or the path of a GGUF file;
the last two need no settings file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.commands.stored_models import StoredModels, table_of
from supervisor.errors import ModelInvalid, NoSuchModel, SettingsInvalid
from supervisor.host import download
from supervisor.host.files import expanded, is_regular
from supervisor.host.paths import Directories
from supervisor.hub import file_names, reference
from supervisor.settings.load import Loaded, load

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
    added = {word: _target(word, where, known, stored) for word in words if word not in known}
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


def _target(
    word: str, where: Directories, known: Mapping[str, object], stored: StoredModels
) -> _Target:
    path = expanded(Path(word)).absolute()
    if word.endswith(".gguf") or ("/" in word and is_regular(path)):
        return _Target(str(path), name_of(Path(word)), {"path": str(path)})
    pins = download.pins()
    if word in pins and download.is_fetched(pins[word], where.models):
        return _Target(word, word, {"path": str(pins[word].path(where.models))})
    if found := stored.find(word):
        return _Target(found.name, found.id, table_of(found))
    if word in pins:
        raise ModelInvalid(f"{word} was not fetched yet", hint=f"corral model get {word}")
    if "/" in word:
        raise ModelInvalid(
            f"model file {path} not found, and no stored model is named {word}",
            hint=f"{_fetching(word)}corral model list shows the available models",
        )
    names = [*known, *pins, *stored.names]
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    raise NoSuchModel(
        f"no model is named {word!r}, and it is not the path of a GGUF file",
        hint=f"available: {', '.join(names[:_NAMES_MAX])}{more}",
    )


def _fetching(word: str) -> str:
    try:
        return f"corral model get {reference.parse(word)} fetches it; "
    except NoSuchModel:
        return ""


def name_of(path: Path) -> str:
    """Return a model name for a file."""
    return file_names.model_name(path.name)
