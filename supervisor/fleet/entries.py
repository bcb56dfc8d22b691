"""The models of the settings, as plans take them."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.errors import NoSuchModel
from supervisor.flags.loras import loras_of
from supervisor.flags.plan import ModelEntry
from supervisor.settings.schema import ModelSettings, Settings


def entries_of(settings: Settings) -> dict[str, ModelEntry]:
    serves_ui = settings.proxy.engine_ui is not None
    return {
        name: _entry(name, model, serves_ui=serves_ui) for name, model in settings.models.items()
    }


def entry_named(entries: Mapping[str, ModelEntry], model: str) -> ModelEntry:
    """Look up a model; raises NoSuchModel."""
    if model in entries:
        return entries[model]
    known = ", ".join(entries) or "none"
    raise NoSuchModel(f"no model is named {model!r}", hint=f"models: {known}")


def _entry(name: str, model: ModelSettings, *, serves_ui: bool) -> ModelEntry:
    return ModelEntry(
        name=name,
        path=model.path,
        profile=model.profile,
        replicas=model.replicas,
        flags=model.flags,
        args=model.args,
        draft=model.draft,
        engine=model.engine,
        aliases=model.aliases,
        batching=model.batching,
        loras=loras_of(model.loras),
        serves_ui=serves_ui,
    )
