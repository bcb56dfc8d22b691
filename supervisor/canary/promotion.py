"""Makes the engine of a canary the model's own in `corral.toml`."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.canary.canary import CanaryRequest
from supervisor.engines.installed import EngineSetting
from supervisor.errors import CorralError, SettingsInvalid
from supervisor.reload.reload import ReloadResult
from supervisor.settings.load import Loaded

if TYPE_CHECKING:
    from supervisor.settings.edit import ChangedFile, Edit, Table


def keep_engine(
    request: CanaryRequest, path: Path | None, found: ReloadResult | CorralError
) -> ChangedFile | None:
    """Set the engine in the settings file, of which `found` is a dry run; None if it is set.

    Raises:
        CorralError: The file has changes that are not applied, or cannot be changed.
    """
    from supervisor.settings.edit import change_file  # noqa: PLC0415 (tomlkit takes memory)

    if path is None:
        raise SettingsInvalid("the daemon was started without a settings file")
    path = path.resolve()
    is_set = _has_engine(path, request)
    _check_no_other_changes(found, request.model if is_set else None)
    if is_set:  # by `corral engine canary --promote`, which may write where the daemon may not
        return None
    return change_file(
        path, functools.partial(with_engine, model=request.model, engine=request.engine)
    )


def with_engine(text: str, model: str, engine: EngineSetting) -> Edit:
    """Set `engine` of a model.

    Raises:
        SettingsInvalid: The file does not have the model, or cannot be changed safely.
    """
    from supervisor.settings.edit import Edit, edited, toml  # noqa: PLC0415 (as above)

    line = f"engine = {toml(str(engine))}"
    try:
        after = edited(text, functools.partial(_change, model=model, engine=str(engine)))
    except (SettingsInvalid, LookupError, TypeError) as error:
        raise SettingsInvalid(
            "the settings file cannot be changed safely",
            hint=f"write {line} into [models.{model}], then run corral reload",
        ) from error
    return Edit(after, (f"models.{model}.{line}",))


def check_kept(request: CanaryRequest, loaded: Loaded) -> SettingsInvalid | None:
    """Return an error where another source of settings wins over the file."""
    model = loaded.settings.models.get(request.model)
    if model and model.engine == request.engine:
        return None
    return SettingsInvalid(
        f"models.{request.model}.engine of the settings file has no effect",
        hint="corral config show tells where it is set",
    )


def _change(whole: Table, model: str, engine: str) -> None:
    whole["models"][model]["engine"] = engine


def _has_engine(path: Path, request: CanaryRequest) -> bool:
    try:
        models = tomllib.loads(path.read_text("utf-8"))["models"]
        return bool(models[request.model]["engine"] == str(request.engine))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _check_no_other_changes(found: ReloadResult | CorralError, ours: str | None) -> None:
    if isinstance(found, CorralError):
        raise found
    changes = found.difference
    places = (*changes.added, *changes.removed, *changes.changed)
    if names := [str(place) for place in places if place.model != ours]:
        raise SettingsInvalid(
            f"corral.toml has changes that are not applied yet, of {', '.join(names)}",
            hint="corral reload --dry-run shows them, corral reload applies them",
        )
