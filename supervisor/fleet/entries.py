"""The models of the settings, as plans take them."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.errors import NoSuchModel
from supervisor.flags.loras import loras_of
from supervisor.flags.plan import ModelEntry
from supervisor.settings.schema import ModelSettings


def entries_of(models: Mapping[str, ModelSettings]) -> dict[str, ModelEntry]:
    return {name: _entry(name, model) for name, model in models.items()}


def entry_named(entries: Mapping[str, ModelEntry], model: str) -> ModelEntry:
    """Look up a model; raises NoSuchModel."""
    if model in entries:
        return entries[model]
    known = ", ".join(entries) or "none"
    raise NoSuchModel(f"no model is named {model!r}", hint=f"models: {known}")


def _entry(name: str, model: ModelSettings) -> ModelEntry:
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
    )
