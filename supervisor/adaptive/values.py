"""The adapted values of all models. They end with the daemon."""

from __future__ import annotations

from supervisor.flags.setting import Settings


class AdaptedValues:
    def __init__(self) -> None:
        self._by_model: dict[str, Settings] = {}

    def models(self) -> tuple[str, ...]:
        """Return the models that have adapted values."""
        return tuple(self._by_model)

    def of(self, model: str) -> Settings:
        """Return the values of a model that replace planned ones."""
        return self._by_model.get(model, {})

    def set(self, model: str, values: Settings) -> None:
        """Replace the values of a model; none means as planned."""
        self._by_model.pop(model, None)
        if values:
            self._by_model[model] = dict(values)
