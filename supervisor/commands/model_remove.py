"""`corral model remove` and `prune`: give the space of models back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from supervisor.commands.stored_models import StoredModels
from supervisor.control.client import Client
from supervisor.errors import (
    AccessDenied,
    ModelInUse,
    ModelKept,
    NoSuchModel,
    NotConfirmed,
    NotRunning,
)
from supervisor.host.paths import Directories, directories
from supervisor.model_stores.leftovers import Leftover, leftovers
from supervisor.model_stores.removal import bytes_of, doomed, keeper_hint, remove_files
from supervisor.model_stores.stored_model import StoredModel
from supervisor.output import CommandResult, size, table
from supervisor.settings.load import load

# Asks a question with yes or no; None where nobody can be asked.
Ask = Callable[[str], bool] | None


def remove(name: str, config: Path | None, ask: Ask, *, yes: bool) -> CommandResult:
    """Delete a model that no engine serves.

    Raises:
        NoSuchModel: There is none of this name.
        ModelKept: Another program keeps it.
        ModelInUse: A running engine has its file.
        NotConfirmed: Nobody could be asked.
    """
    where = directories()
    settings = load(config, config_dir=where.config).settings
    found = StoredModels(settings, where).catalogue.find(name)
    if found is None:
        raise NoSuchModel(
            f"no stored model is named {name!r}", hint="corral model list shows the names"
        )
    if hint := keeper_hint(found):
        raise ModelKept(f"{found.name} belongs to {_keeper(found)}", hint=hint)
    _check_unused(found, where)
    files = doomed(found)
    freed = bytes_of(files)
    question = f"remove {found.name}, {size(freed)} in {found.path.parent}?"
    if not _confirmed(question, ask, yes=yes):
        return CommandResult({"removed": [], "freed_bytes": 0}, "nothing was removed")
    _delete(files, found.root)
    left = [key for key, model in settings.models.items() if model.path in found.files]
    notes = tuple(f"corral.toml still has [models.{key}], which has no file now" for key in left)
    data = {"removed": [str(path) for path in files], "freed_bytes": freed}
    return CommandResult(data, f"removed {found.name}: {size(freed)}", notes)


def prune(config: Path | None, ask: Ask, *, yes: bool, dry_run: bool) -> CommandResult:
    """Delete unfinished downloads, and parts of models that nothing uses."""
    where = directories()
    stored = StoredModels(load(config, config_dir=where.config).settings, where)
    notes: list[str] = []
    found = list(leftovers(stored.places, notes))
    freed = sum(one.size_bytes for one in found)
    shown = table(("SIZE", "REASON", "FILE"), [_row(one) for one in found])
    data = {"files": [_data(one) for one in found], "freed_bytes": 0 if dry_run else freed}
    if not found:
        return CommandResult(data, "nothing to prune", tuple(notes))
    if dry_run:
        return CommandResult(data, f"{shown}\n\n{size(freed)} would be freed", tuple(notes))
    if not _confirmed(f"{shown}\n\nremove these files, {size(freed)}?", ask, yes=yes):
        return CommandResult({"files": [], "freed_bytes": 0}, "nothing was removed", tuple(notes))
    for root in dict.fromkeys(one.root for one in found):
        _delete([one.path for one in found if one.root == root], root)
    return CommandResult(data, f"{shown}\n\n{size(freed)} freed", tuple(notes))


def _row(one: Leftover) -> tuple[str, str, str]:
    return size(one.size_bytes), one.reason, str(one.path)


def _data(one: Leftover) -> dict[str, object]:
    return {"path": str(one.path), "size_bytes": one.size_bytes, "reason": one.reason}


def _keeper(model: StoredModel) -> str:
    names = {"ollama": "Ollama", "lmstudio": "LM Studio"}
    return names.get(model.store, f"the directory {model.root}, which the setting models_dir names")


def _check_unused(model: StoredModel, where: Directories) -> None:
    try:
        status = Client(where.control_socket).status()
    except NotRunning:
        return
    for one in status["models"]:
        is_running = any(instance["pid"] for instance in one["instances"])
        if is_running and Path(one["path"]) in {model.path, *model.files}:
            raise ModelInUse(
                f"{model.name} is being served as {one['name']}", hint=f"corral stop {one['name']}"
            )


def _confirmed(question: str, ask: Ask, *, yes: bool) -> bool:
    if yes:
        return True
    if ask is None:
        raise NotConfirmed("nothing was removed: there is no terminal to ask at", hint="add --yes")
    return ask(question)


def _delete(files: Sequence[Path], root: Path) -> None:
    try:
        remove_files(files, root)
    except OSError as error:
        raise AccessDenied(
            f"cannot delete {error.filename}: {error.strerror}",
            hint="make its directory writable, then run the same command again",
        ) from error
