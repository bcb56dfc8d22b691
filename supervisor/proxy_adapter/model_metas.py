"""What the files of models tell clients.

A model that was planned has its metadata at hand. The file of another one is read once for each
version of the settings, never for a request: a file system may not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from supervisor.errors import CorralError
from supervisor.flags import projector
from supervisor.fleet.model import Model
from supervisor.fleet.planner import LaunchPlanner
from supervisor.gguf.model_meta import model_meta

Meta = Mapping[str, int | str]

_NOTHING: Final[Meta] = MappingProxyType({})


class ModelMetas:
    def __init__(self) -> None:
        self._planner: LaunchPlanner | None = None
        self._read: dict[str, Meta] = {}
        self._reads_images: dict[str, bool] = {}

    def of(self, model: Model, planner: LaunchPlanner) -> Meta:
        """Return what is known of a model; nothing where its file cannot be read."""
        if plan := model.plan:
            return model_meta(plan.gguf)
        self._begin(planner)
        name = model.entry.name
        if name not in self._read:
            self._read[name] = _of_file(name, planner)
        return self._read[name]

    def reads_images(self, model: Model, planner: LaunchPlanner) -> bool:
        if plan := model.plan:
            return projector.FLAG in plan.memory_inputs.chosen
        self._begin(planner)
        name = model.entry.name
        if name not in self._reads_images:
            self._reads_images[name] = _has_projector(name, planner)
        return self._reads_images[name]

    def _begin(self, planner: LaunchPlanner) -> None:
        if planner is not self._planner:
            self._planner, self._read, self._reads_images = planner, {}, {}


def _of_file(model: str, planner: LaunchPlanner) -> Meta:
    try:
        return model_meta(planner.gguf(model))
    except CorralError:  # its start reports why
        return _NOTHING


def _has_projector(model: str, planner: LaunchPlanner) -> bool:
    try:
        return planner.projector(model) is not None
    except CorralError:
        return False
