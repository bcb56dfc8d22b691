"""Adds stored models to the settings: `serve_found`, and models that a command names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import islice
from typing import Any, Final

from supervisor.errors import ModelInvalid
from supervisor.models import pinned as pinned_module
from supervisor.models.catalogue import Catalogue, search
from supervisor.models.local_stores import Root, roots
from supervisor.models.stored_model import StoredModel
from supervisor.output import warn
from supervisor.settings.load import Loaded
from supervisor.settings.messages import all_names
from supervisor.settings.schema import FoundModel, Settings
from supervisor.system.paths import Directories

_SERVED_MAX: Final = 256


class StoredModels:
    """Models on this machine that the settings do not have; searched once, at the first use."""

    def __init__(self, settings: Settings, where: Directories) -> None:
        self._settings = settings
        self._where = where

    @cached_property
    def catalogue(self) -> Catalogue:
        own = self._where.models
        pinned = {pin.path(own): name for name, pin in pinned_module.pins().items()}
        return search(self.places, self._where.cache, all_names(self._settings.models), pinned)

    @property
    def places(self) -> tuple[Root, ...]:
        return roots(self._where.models, self._settings.models_dirs)

    @property
    def others(self) -> list[StoredModel]:
        """The models whose files the settings do not have."""
        known = self._settings.models
        own = {model.path for model in known.values()}
        return [
            model
            for model in self.catalogue.models
            if model.path not in own and model.id not in known
        ]

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.catalogue.models if not model.problem]

    def find(self, word: str) -> StoredModel | None:
        """Return the stored model of a name; raises ModelInvalid if it cannot be served."""
        found = self.catalogue.find(word)
        if found and found.problem:
            raise ModelInvalid(
                f"{word} cannot be served: {found.problem}", hint=f"its file is {found.path}"
            )
        return found

    def with_stored_models(self, loaded: Loaded) -> Loaded:
        """Return the settings with all stored models, if `serve_found` is set."""
        if not loaded.settings.serve_found:
            return loaded
        for note in self.catalogue.notes:
            warn(note)
        found = {
            model.id: FoundModel(**table_of(model)) for model in self.others if not model.problem
        }
        if len(found) > _SERVED_MAX:
            some = f"{_SERVED_MAX} of {len(found)} models"
            warn(f"serve_found serves {some}; corral start NAME serves others")
            found = dict(islice(found.items(), _SERVED_MAX))
        return loaded.with_models(found)


def table_of(model: StoredModel) -> Mapping[str, Any]:
    """Return `[models.NAME]` for a stored model."""
    aliases = () if model.name == model.id else (model.name,)
    return {"path": str(model.path), "flags": model.flags, "aliases": aliases}
