"""What the words on the command line mean: which settings, which models.

A model is a name from `corral.toml`, the name of a fetched model, or the path of a GGUF; the last
two need no settings file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.control.messages import DaemonStatus
from supervisor.errors import ModelInvalid, NoSuchModel, SettingsInvalid
from supervisor.host import download
from supervisor.host.files import expanded
from supervisor.host.paths import Directories
from supervisor.settings.load import Loaded, load


@dataclass(frozen=True, slots=True)
class Targets:
    """The settings to run with, and the models that were meant.

    Attributes:
        loaded: The settings, with the models that only the command line names.
        names: The models meant, by their names in the settings; all where none was named.
        words: The same, as words that mean them in any directory; empty where none was named.
    """

    loaded: Loaded
    names: tuple[str, ...]
    words: tuple[str, ...]


def choose(
    words: Sequence[str], config: Path | None, where: Directories, listen: str | None = None
) -> Targets:
    """Read the settings and find the models that the words mean.

    Raises:
        SettingsInvalid: The settings are wrong, or there is no model at all.
        NoSuchModel: A word is no model's name and no file.
        ModelInvalid: A word is a pinned model that was not fetched yet.
    """
    overrides: dict[str, Any] = {"proxy": {"listen": listen}} if listen else {}
    loaded = load(config, config_dir=where.config, overrides=overrides)
    known = loaded.settings.models
    files = {word: _file(word, where, known) for word in words if word not in known}
    if files:
        overrides["models"] = {name: {"path": str(path)} for name, path in files.values()}
        loaded = load(config, config_dir=where.config, overrides=overrides)
    if not (loaded.settings.models or loaded.settings.nodes):
        raise SettingsInvalid(
            "no model is configured",
            hint="corral start FILE.gguf serves a file; corral model get smollm2 fetches one",
        )
    names = tuple(files[word][0] if word in files else word for word in words)
    return Targets(
        loaded,
        names=names or tuple(loaded.settings.models),
        words=tuple(str(files[word][1]) if _looks_like_path(word) else word for word in words),
    )


def settings_reader(
    choice: Targets, where: Directories, listen: str | None
) -> Callable[[], Loaded]:
    """Return what reads the sources of a choice again: the same file, and the same words.

    Only words that name files are said again: those that name models of the settings file chose
    among them, and the file may have others by now.
    """
    origins = choice.loaded.origins
    pairs = zip(choice.names, choice.words, strict=False)  # without words, all are named
    files = [word for name, word in pairs if origins[f"models.{name}.path"] == "command line"]

    def read() -> Loaded:
        return choose(files, choice.loaded.path, where, listen).loaded

    return read


def resolve_running(words: Sequence[str], status: DaemonStatus) -> tuple[str, ...]:
    """Return which models of a running daemon the words mean: by name, or by the file's path.

    Raises:
        NoSuchModel: It has no such model.
    """
    by_path = {model["path"]: model["name"] for model in status["models"]}
    names = [model["name"] for model in status["models"]]
    found = [word if word in names else by_path.get(str(Path(word).absolute())) for word in words]
    for word, name in zip(words, found, strict=True):
        if name is None:
            raise NoSuchModel(
                f"the running daemon has no model {word!r}",
                hint=f"it has: {', '.join(names)}; corral stop ends it, to start it with others",
            )
    return tuple(name for name in found if name)


def _file(word: str, where: Directories, known: Mapping[str, object]) -> tuple[str, Path]:
    """Return name and path of a model that the settings do not name."""
    if _looks_like_path(word):
        return name_of(Path(word)), expanded(Path(word)).absolute()
    pins = download.pins()
    if word not in pins:
        raise NoSuchModel(
            f"no model is named {word!r}, and it is no path of a GGUF",
            hint=f"models there are: {', '.join([*known, *pins])}",
        )
    if not download.is_fetched(pins[word], where.models):
        raise ModelInvalid(f"{word} was not fetched yet", hint=f"corral model get {word}")
    return word, pins[word].path(where.models)


def _looks_like_path(word: str) -> bool:
    return word.endswith(".gguf") or "/" in word


def name_of(path: Path) -> str:
    """Return a model name for a file: its stem, with what names may not have made dashes."""
    cleaned = re.sub(r"[^A-Za-z0-9._:@+-]+", "-", path.stem).lstrip("._:@+-")
    return cleaned[:64] or "model"
