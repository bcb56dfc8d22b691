"""Lays the canaries on the settings; `corral.toml` does not have them."""

from __future__ import annotations

from supervisor.flags.trial import CanaryTrial
from supervisor.settings.schema import ModelSettings, Settings


class CanaryTrials:
    """The trials of canaries by model."""

    def __init__(self) -> None:
        self._trials: dict[str, CanaryTrial] = {}

    def set(self, model: str, trial: CanaryTrial) -> None:
        self._trials[model] = trial

    def remove(self, model: str) -> None:
        self._trials.pop(model, None)

    def laid_on(self, settings: Settings) -> Settings:
        """Return settings with the canaries of those models that can have one."""
        changed = {
            name: model.model_copy(update={"trial": self._trials[name]})
            for name, model in settings.models.items()
            if name in self._trials and can_have_canary(model)
        }
        if not changed:
            return settings
        return settings.model_copy(update={"models": {**settings.models, **changed}})


def can_have_canary(model: ModelSettings) -> bool:
    """Whether a model has neither a trial, which is one replica more, nor RPC workers."""
    return model.trial is None and not model.workers
