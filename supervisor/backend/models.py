"""Lists, loads and unloads models for the proxy, and reports their metadata and engines.

Directories are removed from reasons that clients see: a reason quotes settings, the system and the
engine's log. `corral status` and `corral logs` show the complete reason to the user.

A planned model has its metadata at hand. The file of another model is read once per version of the
settings, never for a request, because a file system may not answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from operator import is_
from pathlib import Path
from types import MappingProxyType
from typing import Final

from proxy.cache.prompt_rules import PromptRules
from proxy.common.background_tasks import FAILURES
from proxy.errors import ModelFailed, Unavailable, UnknownModel
from proxy.observe.record import LoadCause
from proxy.request.models import GpuUse, ModelInfo, ModelNames, OnLoad, do_nothing_on_load
from proxy.router.estimator import LoadForecast
from supervisor.builds.discover import runtime_metadata
from supervisor.errors import CorralError, NoSuchModel
from supervisor.events import LOAD_PROGRESS, Event, EventStream, Part
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import adapters_of
from supervisor.fleet.model import Model, availability, gpu_use, ready_estimates
from supervisor.fleet.planner import LaunchPlanner
from supervisor.loading.controller import AdmissionController
from supervisor.models.model_meta import model_meta
from supervisor.plan import embedding
from supervisor.settings.tables import CATCH_ALL

_QUOTED: Final = re.compile(r"""(?P<mark>['"`])~?/[^'"`]*/(?P<name>[^'"`/]*)(?P=mark)""")
_BARE: Final = re.compile(r"""(?<![\w./~-])~?/(?:[^\s/'"`]+/)+""")


def without_directories(text: str, known: Iterable[Path] = ()) -> str:
    """Reduce absolute paths to their last part.

    Directories with spaces are only found if they hold `known` files.
    """
    for directory in sorted({str(path.parent) for path in known}, key=len, reverse=True):
        text = text.replace(f"{directory}/", "")
    text = _QUOTED.sub(r"\g<mark>\g<name>\g<mark>", text)
    return _BARE.sub("", text)


Meta = Mapping[str, int | str]

_NOTHING: Final[Meta] = MappingProxyType({})


class ModelMetas:
    """Facts from the files of models: their metadata, and whether they read images."""

    def __init__(self) -> None:
        self._planner: LaunchPlanner | None = None
        self._read: dict[str, tuple[Meta, bool]] = {}

    def read(self, model: Model, planner: LaunchPlanner) -> tuple[Meta, bool]:
        """Return nothing and False if its file cannot be read."""
        if plan := model.plan:
            return model_meta(plan.gguf), embedding.FLAG in plan.memory_inputs.chosen
        if planner is not self._planner:
            self._planner, self._read = planner, {}
        name = model.entry.name
        if name not in self._read:
            meta, reads_images = _NOTHING, False
            with suppress(CorralError):  # its start reports why
                meta = model_meta(planner.gguf(name))
                reads_images = planner.projector(name) is not None
            self._read[name] = meta, reads_images
        return self._read[name]


_RETRY_AFTER_S: Final = 60
# Memory becomes free when another model is idle for long enough, or a program ends.
_RETRY_REFUSED_S: Final = 10
# Events after which a model's state or load progress may have changed.
_CHANGES: Final = frozenset(
    {
        LOAD_PROGRESS,
        *("instance.state_changed", "instance.failed"),
        *("model.load_refused", "model.unloaded", "settings.reloaded", "node.up", "node.down"),
    }
)


class LocalModels(Part):
    """The configured models of this machine.

    It is the proxy's `ModelLoader`, `ModelControl`, `EngineReader` and `LoadForecaster`.
    """

    def __init__(self, fleet: Fleet, admission: AdmissionController, events: EventStream) -> None:
        self._fleet = fleet
        self._admission = admission
        self._events = events
        self._listening: set[asyncio.Event] = set()
        self._created = int(datetime.now(tz=UTC).timestamp())
        self._metas = ModelMetas()
        self._names = ModelNames(())
        self._named: list[object] = []  # the settings that the names come from
        self._prompt_rules = PromptRules({})

    def models(self) -> list[ModelInfo]:
        models = self._fleet.models.values()
        return [self._model_info(model) for model in models if model.is_configured]

    def names(self) -> ModelNames:
        models = [model for model in self._fleet.models.values() if model.is_configured]
        named = [self._fleet.planner, *(model.entry for model in models)]
        if len(named) != len(self._named) or not all(map(is_, named, self._named)):
            self._named = named
            settings = self._fleet.planner.settings.proxy
            if settings.prompt_rules != self._prompt_rules.rules:
                self._prompt_rules = PromptRules(settings.prompt_rules)
            rules = self._prompt_rules if settings.prompt_rules else None
            self._names = ModelNames(self.models(), settings.default_model, rules)
        return self._names

    async def ensure_ready(
        self, model: str, on_load: OnLoad = do_nothing_on_load
    ) -> LoadCause | None:
        """Load a model and wait until it serves, as `ModelLoader` has it.

        Raises:
            ModelFailed: It is stopped, failed, or there is no memory for it.
            UnknownModel: It is no longer configured.
        """
        found, cause = self._find(model), LoadCause()
        with self._admission.request_load(found), self._events.listen() as changes:
            while (state := availability(found)[0]) in {"loading", "unloaded"}:
                if state == "loading":
                    on_load()
                else:
                    cause = self._admission.load_cause(model, cause)
                await changes.next()
                found = self._find(model)
        state, reason = availability(found)
        if state != "loaded":
            raise failure(found, reason)
        return cause

    def _find(self, name: str) -> Model:
        found = self._fleet.models.get(name)  # a reload may have removed it
        if found is None or not found.is_configured:
            raise UnknownModel(name, [model_info.id for model_info in self.models()])
        return found

    def _model_info(self, model: Model) -> ModelInfo:
        plan, aliases = model.plan, model.entry.aliases
        state, reason = availability(model)
        model_settings = self._fleet.planner.model_settings(model.entry.name)
        meta, reads_images = self._metas.read(model, self._fleet.planner)
        return ModelInfo(
            id=model.entry.name,
            aliases=tuple(alias for alias in aliases if alias != CATCH_ALL),
            state=state,
            created=self._created,
            context_length=plan.ctx_size // plan.slots if plan else None,
            slots=model.slots,
            reason=_redact_reason(model, reason),
            variants=model_settings.variants,
            fallback=model_settings.fallback,
            repairs_tool_calls=model_settings.tool_calls == "repair",
            tool_call_retries=model_settings.tool_call_retries,
            is_catch_all=CATCH_ALL in aliases,
            meta=meta,
            input_modalities=("text", "image") if reads_images else ("text",),
            adapters=adapters_of(model.entry.loras),
            has_fixed_adapters=model_settings.fixed_adapter_option is not None,
            engine_tools=model_settings.engine_tools,
            chooses_tool_runtime=model_settings.lets_clients_choose_runtime,
            load_progress=_load_progress(model) if state == "loading" else None,
        )

    def load(self, model: str) -> None:
        """Begin to load a model; raises UnknownModel, or ModelFailed if a command stopped it."""
        found = self._fleet.models.get(model)
        if found and not found.is_open:
            raise failure(found, found.refusal or f"it is stopped (corral start {model})")
        self._command("load", model)

    async def load_for_others(self, model: str) -> None:
        """Begin to load a model for another machine.

        Raises:
            ModelFailed: It was stopped or failed.
            Unavailable: It would displace something in use.
            UnknownModel: It is no longer configured.
        """
        found = self._find(model)
        state, reason = availability(found)
        if state == "failed":
            raise failure(found, reason)
        if state == "unloaded":
            reason = await self._admission.load_for_others(model)
        if reason:
            shown = without_directories(reason)
            raise Unavailable(f"{model} is not loaded here: {shown}", _RETRY_AFTER_S)

    def unload(self, model: str) -> None:
        """Begin to unload a model; raises UnknownModel."""
        self._command("unload", model)
        self._events.emit("model.unloaded", model=model, reason="a client asked for it")

    @contextmanager
    def changes(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set after each change of a model's state or load progress."""
        changed = asyncio.Event()
        self._listening.add(changed)
        try:
            yield changed
        finally:
            self._listening.discard(changed)

    def _command(self, verb: str, model: str) -> None:
        try:
            self._admission.command(verb, [model])
        except NoSuchModel as error:  # a reload has removed it
            raise UnknownModel(model, list(self._fleet.models)) from error

    def observe(self, event: Event) -> None:
        if event.name in _CHANGES:
            for waiter in self._listening:
                waiter.set()

    def load_forecast(self, model: str) -> LoadForecast | None:
        """Return the effects of a request; None if the model is not configured here."""
        found = self._fleet.models.get(model)
        if found is None or not found.is_configured:
            return None
        state, reason = availability(found)
        try:
            eviction = self._admission.forecast(found)
        except OSError as error:  # the memory of the machine cannot be read now
            FAILURES.note("load forecast", error)
            return LoadForecast(None)
        load_s = self._admission.load_s(found)
        refusal = reason if state == "failed" else eviction.refusal
        plan = found.plan
        return LoadForecast(
            None if load_s is None else load_s + eviction.wait_s,
            eviction.models,
            instances=len(found.replicas),
            slots=plan.slots if plan else 1,
            refusal=refusal and without_directories(refusal, [found.entry.path]),
            group=eviction.rule.group if eviction.rule else None,
        )

    def gpu_use(self, model: str) -> GpuUse:
        return gpu_use(ready_estimates(self._fleet.models.get(model)))

    async def runtime(self) -> Mapping[str, object]:
        """Describe the settings' engine, which may run it; raises Unavailable without one."""
        try:
            engine = await asyncio.to_thread(self._fleet.planner.engine)
        except CorralError as error:
            message = without_directories("; ".join(filter(None, (error.message, error.hint))))
            raise Unavailable(message, retry_after_s=10) from error
        return dict(runtime_metadata(engine))


def failure(model: Model, reason: str | None) -> ModelFailed:
    """Return the error for clients of a model that is stopped, failed, or has no memory.

    The next request tries only a model without memory again; others need a command.
    """
    is_tried_again = model.is_open and reason is not None and reason == model.refusal
    return ModelFailed(
        f"{model.entry.name} is unavailable: {_redact_reason(model, reason)}",
        retry_after_s=_RETRY_REFUSED_S if is_tried_again else None,
    )


def _redact_reason(model: Model, reason: str | None) -> str | None:
    return reason and without_directories(reason, [model.entry.path])


def _load_progress(model: Model) -> float | None:
    """Return the progress of the replica that is furthest: it serves first."""
    found = [replica.instance.snapshot().load_progress for replica in model.all_replicas]
    return max((progress for progress in found if progress is not None), default=None)
