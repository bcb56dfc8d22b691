"""The models that are stored on this machine, as commands and the daemon know them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import islice
from typing import Any, Final

from supervisor.errors import ModelInvalid
from supervisor.host import download
from supervisor.host.paths import Directories
from supervisor.model_stores.catalogue import Catalogue, search
from supervisor.model_stores.roots import Root, roots
from supervisor.model_stores.stored_model import StoredModel
from supervisor.output import warn
from supervisor.settings.load import Loaded
from supervisor.settings.messages import all_names
from supervisor.settings.schema import FoundModel, Settings

_SERVED_MAX: Final = 256


class StoredModels:
    """Models that no table of the settings has; looked for once, when first asked for."""

    def __init__(self, settings: Settings, where: Directories) -> None:
        self._settings = settings
        self._where = where

    @cached_property
    def catalogue(self) -> Catalogue:
        own = self._where.models
        pinned = {pin.path(own): name for name, pin in download.pins().items()}
        return search(self.places, self._where.cache, all_names(self._settings.models), pinned)

    @property
    def places(self) -> tuple[Root, ...]:
        return roots(self._where.models, self._settings.models_dirs)

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.catalogue.models if not model.problem]

    def find(self, word: str) -> StoredModel | None:
        """Return the stored model of a name; raises ModelInvalid where it cannot be served."""
        found = self.catalogue.find(word)
        if found and found.problem:
            raise ModelInvalid(
                f"{word} cannot be served: {found.problem}", hint=f"its file is {found.path}"
            )
        return found

    def served(self, loaded: Loaded) -> Loaded:
        """Return the settings with all stored models, if they say so."""
        settings = loaded.settings
        if not settings.serve_found:
            return loaded
        for note in self.catalogue.notes:
            warn(note)
        own = {model.path for model in settings.models.values()}
        found = {
            model.id: FoundModel(**table_of(model))
            for model in self.catalogue.models
            if not model.problem and model.path not in own and model.id not in settings.models
        }
        if len(found) > _SERVED_MAX:
            warn(
                f"serve_found serves {_SERVED_MAX} of {len(found)} models; "
                "corral start NAME serves others"
            )
            found = dict(islice(found.items(), _SERVED_MAX))
        return loaded.with_models(found)


def table_of(model: StoredModel) -> Mapping[str, Any]:
    """Return `[models.NAME]` for a stored model."""
    aliases = () if model.name == model.id else (model.name,)
    return {"path": str(model.path), "flags": model.flags, "aliases": aliases}
