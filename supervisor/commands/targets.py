"""Resolves the words of the command line to settings and models.

A word is a model of `corral.toml`, a fetched model, or the path of a GGUF file; the last two need
no settings file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.errors import ModelInvalid, NoSuchModel, SettingsInvalid
from supervisor.host import download
from supervisor.host.files import expanded
from supervisor.host.paths import Directories
from supervisor.hub import file_names
from supervisor.settings.load import Loaded, load


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
    known = loaded.settings.models
    added = {word: _file(word, where, known) for word in words if word not in known}
    if added:
        overrides["models"] = {name: {"path": str(path)} for name, path in added.values()}
        loaded = load(config, config_dir=where.config, overrides=overrides)
    if not (loaded.settings.models or loaded.settings.nodes):
        raise SettingsInvalid(
            "no model is configured",
            hint="corral start FILE.gguf serves a file; corral model get smollm2 fetches one",
        )
    names = tuple(added[word][0] if word in added else word for word in words)
    return Targets(
        loaded,
        names=names or tuple(loaded.settings.models),
        added=tuple(
            str(path) if _looks_like_path(word) else word for word, (_, path) in added.items()
        ),
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


def _file(word: str, where: Directories, known: Mapping[str, object]) -> tuple[str, Path]:
    if _looks_like_path(word):
        return name_of(Path(word)), expanded(Path(word)).absolute()
    pins = download.pins()
    if word not in pins:
        raise NoSuchModel(
            f"no model is named {word!r}, and it is not the path of a GGUF file",
            hint=f"available: {', '.join([*known, *pins])}",
        )
    if not download.is_fetched(pins[word], where.models):
        raise ModelInvalid(f"{word} was not fetched yet", hint=f"corral model get {word}")
    return word, pins[word].path(where.models)


def _looks_like_path(word: str) -> bool:
    return word.endswith(".gguf") or "/" in word


def name_of(path: Path) -> str:
    """Return a model name for a file."""
    return file_names.model_name(path.name)
