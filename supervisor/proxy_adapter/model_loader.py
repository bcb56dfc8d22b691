"""Lists and loads models for the proxy (proxy.models.ModelLoader)."""

from __future__ import annotations

from datetime import UTC, datetime
from operator import is_

from proxy.errors import ModelFailed, UnknownModel
from proxy.models import ModelInfo, ModelNames, OnLoad, nothing
from supervisor.admission.controller import AdmissionController
from supervisor.events import EventStream
from supervisor.fleet.availability import availability
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import adapters_of
from supervisor.fleet.model import Model
from supervisor.proxy_adapter.model_metas import ModelMetas
from supervisor.proxy_adapter.redact import without_directories
from supervisor.settings.types import CATCH_ALL


class ModelLoaderAdapter:
    """The configured models; `created` is Unix time in whole seconds."""

    def __init__(self, fleet: Fleet, admission: AdmissionController, events: EventStream) -> None:
        self._fleet = fleet
        self._admission = admission
        self._events = events
        self.created = int(datetime.now(tz=UTC).timestamp())
        self._metas = ModelMetas()
        self._names = ModelNames(())
        self._named: list[object] = []  # the settings that the names are of

    def models(self) -> list[ModelInfo]:
        models = self._fleet.models.values()
        return [self._model_info(model) for model in models if model.is_configured]

    def names(self) -> ModelNames:
        models = [model for model in self._fleet.models.values() if model.is_configured]
        named = [self._fleet.planner, *(model.entry for model in models)]
        if len(named) != len(self._named) or not all(map(is_, named, self._named)):
            self._named = named
            self._names = ModelNames(self.models(), self._fleet.planner.default_model)
        return self._names

    async def ensure_ready(self, model: str, on_load: OnLoad = nothing) -> None:
        """Load a model and wait until it serves; the caller sets the deadline.

        Raises:
            ModelFailed: It is stopped, failed, or there is no memory for it.
            UnknownModel: It is no longer configured.
        """
        found = self._find(model)
        with self._admission.request_load(found), self._events.listen() as changes:
            while (state := availability(found)[0]) in {"loading", "unloaded"}:
                if state == "loading":
                    on_load()
                await changes.next()
                found = self._find(model)
        state, reason = availability(found)
        if state != "loaded":
            raise failure(found, reason)

    def _find(self, name: str) -> Model:
        found = self._fleet.models.get(name)  # a reload may have removed it
        if found is None or not found.is_configured:
            raise UnknownModel(name, [model_info.id for model_info in self.models()])
        return found

    def _model_info(self, model: Model) -> ModelInfo:
        plan, aliases = model.plan, model.entry.aliases
        state, reason = availability(model)
        model_settings = self._fleet.planner.model_settings(model.entry.name)
        return ModelInfo(
            id=model.entry.name,
            aliases=tuple(alias for alias in aliases if alias != CATCH_ALL),
            state=state,
            created=self.created,
            context_length=plan.ctx_size // plan.slots if plan else None,
            slots=model.slots,
            reason=_redacted(model, reason),
            variants=model_settings.variants,
            fallback=model_settings.fallback,
            is_catch_all=CATCH_ALL in aliases,
            meta=self._metas.of(model, self._fleet.planner),
            input_modalities=self._modalities(model),
            adapters=adapters_of(model.entry.loras),
            has_fixed_adapters=model_settings.fixed_adapter_option is not None,
            load_progress=_load_progress(model) if state == "loading" else None,
        )

    def _modalities(self, model: Model) -> tuple[str, ...]:
        reads_images = self._metas.reads_images(model, self._fleet.planner)
        return ("text", "image") if reads_images else ("text",)


def failure(model: Model, reason: str | None) -> ModelFailed:
    """Return what clients are told of a model that is stopped, failed, or has no memory."""
    return ModelFailed(f"{model.entry.name} is unavailable: {_redacted(model, reason)}")


def _redacted(model: Model, reason: str | None) -> str | None:
    return reason and without_directories(reason, [model.entry.path])


def _load_progress(model: Model) -> float | None:
    """Return that of the replica which is farthest: it serves first."""
    found = [one.instance.snapshot().load_progress for one in model.all_replicas]
    return max((one for one in found if one is not None), default=None)
