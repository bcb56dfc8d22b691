"""Plans and launches instances from the settings, again for every run.

Planning takes milliseconds (engines and GGUFs are cached by path, size and mtime), and the next
start uses a repaired model file or an upgraded engine.
"""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from proxy.adapter import Adapter, with_adapter
from supervisor.calibration.store import MeasurementStore
from supervisor.engine_client.endpoint import Endpoint
from supervisor.engines import discover as engines
from supervisor.engines import search
from supervisor.engines.discover import Engine
from supervisor.engines.installed import EngineSetting
from supervisor.errors import CorralError, NoSuchModel
from supervisor.flags import draft_model, loras
from supervisor.flags import projector as projectors
from supervisor.flags.adapted_slots import SLOTS
from supervisor.flags.auto import AUTO
from supervisor.flags.draft_heads import offered_types
from supervisor.flags.draft_model import Draft
from supervisor.flags.file_paths import check_files
from supervisor.flags.loras import Lora
from supervisor.flags.plan import ModelEntry, Plan, make_plan, unix_sockets
from supervisor.flags.profile import Profile
from supervisor.flags.setting import Settings as FlagSettings
from supervisor.flags.thread_speeds import ThreadMeasurement
from supervisor.flags.trial import CanaryTrial, TrialSettings, with_context_of
from supervisor.fleet.launch_id import FileVersion, LaunchFingerprint, ReplicaId
from supervisor.fleet.reductions import Reductions
from supervisor.fleet.tuned_profiles import ReadTuned, TunedProfiles
from supervisor.gguf import metadata
from supervisor.gguf.metadata import Gguf
from supervisor.host import machine
from supervisor.host.machine import Machine
from supervisor.host.paths import Directories, make_private
from supervisor.instance.backoff import RestartPolicy
from supervisor.memory.fit import MemoryCapacity, capacity, check_fits
from supervisor.memory.inputs import with_free
from supervisor.memory.replicas import Replicas, decide
from supervisor.model_stores.projector import Projector, beside
from supervisor.process.launch import Launch, ProcessTag, clean_environment
from supervisor.settings.balance import BalanceSettings
from supervisor.settings.schema import (
    FoundModel,
    ModelSettings,
    Settings,
    SupervisorSettings,
)
from supervisor.shards.layer_shares import LayerShares
from supervisor.shards.plan import shard_plans, worker_split
from supervisor.shards.run import ShardRun
from supervisor.slot_store.config import slot_persistence
from supervisor.warmup import prompts
from supervisor.warmup.learned import LearnedPrompts
from supervisor.warmup.prompts import WarmPrompt
from supervisor.workers.known import KnownWorkers
from supervisor.workers.of_models import ModelWorkers

_LOOPBACK: Final = "127.0.0.1"
# Larger models take long to load, and lose less to the synchronisation of threads.
_MEASURED_MAX_BYTES: Final = 1024**3
_NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


def _nothing_adapted(_model: str) -> FlagSettings:
    return {}


class LaunchPlanner:
    """Plans and launches the instances of one version of the settings.

    Args:
        adapted: Returns the values of a model that the daemon changed while it serves.
        read_tuned: For tuned profiles that are no files.
        known_workers: What is known of workers; unset: nothing.
        reductions: What models gave up after their engines ran out of memory; unset: nothing.
    """

    def __init__(
        self,
        settings: Settings,
        directories: Directories,
        adapted: Callable[[str], FlagSettings] = _nothing_adapted,
        *,
        read_tuned: ReadTuned | None = None,
        known_workers: KnownWorkers | None = None,
        reductions: Reductions | None = None,
    ) -> None:
        self.adapted = adapted
        self.reductions = reductions or Reductions()
        self._settings = settings
        self._directories = directories
        self.tuned_profiles = TunedProfiles(directories, read_tuned)
        self.entries: Mapping[str, ModelEntry] = {
            name: _entry(name, model) for name, model in settings.models.items()
        }
        self._replicas: dict[str, Replicas] = {}
        self.slot_persistence = slot_persistence(directories, settings.supervisor)
        self.learned = LearnedPrompts(directories.prompts)
        self.workers = ModelWorkers(settings, known_workers or KnownWorkers())
        self._layer_shares = LayerShares(directories.layer_shares)
        self._layers: Mapping[str, Mapping[str, int]] = {}

    @property
    def instances(self) -> int:
        """The number of processes that share the machine if all models are loaded.

        Models that were found count as one. A canary is not counted: it would run with other
        threads and batches than what it is compared with.
        """
        table = self._settings.models
        found = [name for name in self.entries if isinstance(table[name], FoundModel)]
        own = [name for name in self.entries if name not in found]
        canaries = sum(isinstance(self.trial(name), CanaryTrial) for name in own)
        return sum(len(self.places(name)) for name in own) - canaries + bool(found)

    def places(self, model: str) -> tuple[ReplicaId, ...]:
        """Return the replicas of a model, the one on trial last."""
        count = self.replicas(model).count + (self.trial(model) is not None)
        return tuple(ReplicaId(model, number) for number in range(count))

    def trial(self, model: str) -> TrialSettings | None:
        return self.model_settings(model).trial

    def trial_at(self, place: ReplicaId) -> TrialSettings | None:
        """Return the trial that a replica runs; None for one that runs the model's own profile."""
        is_trial = place.number >= self.replicas(place.model).count
        return self.trial(place.model) if is_trial else None

    def replicas(self, model: str) -> Replicas:
        """Return how many instances run a model's own profile; decided once."""
        entry = self.entry(model)
        if model not in self._replicas:
            self._replicas[model] = self._count(entry)
        return self._replicas[model]

    def _count(self, entry: ModelEntry) -> Replicas:
        if self._settings.models[entry.name].workers:
            return Replicas(1, "a worker serves one engine at a time")
        is_set = "replicas" in self._settings.models[entry.name].model_fields_set
        if not is_set and (count := self.tuned_profiles.replicas(entry)):
            return Replicas(count, "tuned")
        if entry.replicas != "auto":
            return Replicas(entry.replicas, "as set")
        return self._decide(entry)

    def _decide(self, entry: ModelEntry) -> Replicas:
        models = len(self.entries)
        try:
            plan = self._plan(entry, {}, instances=models)
        except CorralError:
            return Replicas(1, "it cannot be planned")  # its start reports why
        return decide(plan.memory_inputs, machine.read(), self.capacity(plan.engine), models)

    def adapting(self, model: str, to: FlagSettings) -> LaunchPlanner:
        """Return a planner of the same settings with other adapted values of one model."""
        other = copy.copy(self)
        other.adapted = lambda name: to if name == model else self.adapted(name)
        return other

    def reduced(self, model: str) -> FlagSettings:
        """Return what replaces planned values after the engine ran out of memory."""
        return self.reductions.of(self.entries[model]) if self.may_reduce(model) else {}

    def may_reduce(self, model: str) -> bool:
        found = self._settings.models.get(model)
        return found is not None and found.on_out_of_memory == "reduce"

    def unreduced(self) -> LaunchPlanner:
        """Return a planner of the same settings for which nothing was given up."""
        other = copy.copy(self)
        other.reductions = Reductions()
        return other

    def with_layers(self, model: str, layers: Mapping[str, int]) -> LaunchPlanner:
        """Return a planner of the same settings with these layers for the workers of one model."""
        other = copy.copy(self)
        other._layers = {**self._layers, model: layers}  # noqa: SLF001 (a copy of this one)
        return other

    def engine(self) -> Engine:
        """Find the engine of models without their own; where all have one, that of the first.

        Raises:
            EngineMissing, EngineBroken: There is none, or it does not run.
        """
        own = [model.engine for model in self._settings.models.values()]
        return self._load(self._settings.engine or (own[0] if own and all(own) else None))

    def _load(self, setting: EngineSetting | None) -> Engine:
        places = search.here(self._directories.engines)
        return engines.load(setting, cache_dir=self._directories.cache, places=places)

    def engine_of(self, entry: ModelEntry) -> Engine:
        """Find the engine of a model, which may have its own; raises as `engine`."""
        if entry.engine is None:
            return self.engine()
        return self._load(entry.engine)

    def engine_at(self, place: ReplicaId) -> Engine:
        """Find the engine of a replica; raises as `engine`."""
        return self.engine_of(self._entry_at(place))

    def _entry_at(self, place: ReplicaId) -> ModelEntry:
        entry, trial = self.entry(place.model), self.trial_at(place)
        return trial.applied(entry) if trial else entry

    def gguf(self, model: str) -> Gguf:
        """Read the metadata of a model's file; raises NoSuchModel or ModelInvalid."""
        return metadata.read(self.entry(model).path, cache_dir=self._directories.cache)

    def plan(self, model: str) -> Plan:
        """Plan a model's instances; reads files.

        Raises:
            NoSuchModel, EngineMissing, EngineBroken, ModelInvalid, SettingsInvalid: It cannot run.
        """
        entry = self.entry(model)
        return self._plan(entry, self.adapted(model), instances=max(1, self.instances))

    def plan_trial(self, model: str, trial: TrialSettings) -> Plan:
        """Plan the replica on trial, as `plan` does; its slots are at least as long as the model's.

        It shares the machine as the others do. Its slots do not follow demand, unless only its
        engine is on trial: then they are those that the model has now.
        """
        entry, instances = trial.applied(self.entry(model)), max(1, self.instances)
        adapted = self.adapted(model)
        if trial.profile or trial.flags:
            adapted = {key: one for key, one in adapted.items() if key != SLOTS}
        plan = self._plan(entry, adapted, instances=instances)
        longer = with_context_of(self.plan(model), plan, entry)
        return self._plan(longer, adapted, instances=instances) if longer else plan

    def plan_at(self, place: ReplicaId, free: Mapping[str, int] = _NOTHING) -> Plan:
        """Plan one replica, as `plan` does, with what is free of each device, where it is known.

        Raises:
            OutOfMemory: It needs more memory than models may use.
        """
        devices = self.replicas(place.model).devices
        if trial := self.trial_at(place):
            plan = self.plan_trial(place.model, trial)
        elif place.number < len(devices):
            entry = self.entry(place.model)
            flags = {**entry.flags, "device": devices[place.number]}
            pinned, adapted = replace(entry, flags=flags), self.adapted(place.model)
            plan = self._plan(pinned, adapted, instances=max(1, self.instances))
        else:
            plan = self.plan(place.model)
        check_fits(place.model, plan.memory_inputs, self.capacity(plan.engine))
        return replace(plan, memory_inputs=with_free(plan.memory_inputs, free))

    def capacity(self, engine: Engine) -> MemoryCapacity:
        return capacity(machine.read(), engine.devices, self._settings.supervisor.memory_budget)

    def _plan(self, entry: ModelEntry, adapted: FlagSettings, *, instances: int) -> Plan:
        cache, engine, here = self._directories.cache, self.engine_of(entry), self._machine()
        workers = self.workers.used_by(entry.name, engine, here)
        entry = replace(entry, workers=workers, reduced=self.reduced(entry.name))
        under = self.tuned_profiles.profile(entry)
        found = metadata.read(entry.path, cache_dir=cache)
        entry = replace(entry, split=self._split(entry, found))
        found_projector = self._projector(entry, under, found)
        entry = replace(entry, projector=found_projector.path)
        projector = {**under.flags, **entry.flags}.get(projectors.FLAG, found_projector.path)
        adapters = self._adapters(entry, found)
        plan = make_plan(
            entry,
            under,
            engine,
            found,
            here,
            instances=instances,
            draft=self._draft(entry, under, engine, found),
            projector_bytes=_size_bytes([projector, *(one.path for one in adapters)]),
            adapted=adapted,
            measured=None if entry.workers else self._measured(found, engine),
        )
        check_files(entry.name, entry.flags, self.entry(entry.name).flags)
        tuned, lost = self.tuned_profiles.warnings(entry, plan), self.workers.lost(entry.name)
        warnings = (
            *plan.warnings,
            *found_projector.skipped,
            *tuned,
            *lost,
            *self.workers.assumed(entry.name),
        )
        return replace(plan, warnings=warnings, lost_workers=lost)

    def _split(self, entry: ModelEntry, found: Gguf) -> str | None:
        """Return the `--tensor-split` to which the layers of a model were moved, if they were."""
        names = [one.name for one in entry.workers]
        layers = self._layers.get(entry.name)
        if layers is None or layers.keys() != set(names):
            layers = self._layer_shares.layers(entry.name, names, found.layers)
        return worker_split(entry.workers, layers) if layers else None

    def shards(self, plan: Plan) -> ShardRun | None:
        """Begin to measure the workers of a run; None without workers."""
        plans = shard_plans(plan, self.workers.addresses(plan.model))
        return ShardRun(plans, self._settings.balance) if plans else None

    @property
    def balance(self) -> BalanceSettings:
        return self._settings.balance

    def _measured(self, found: Gguf, engine: Engine) -> ThreadMeasurement | None:
        is_small = found.tensor_bytes <= _MEASURED_MAX_BYTES
        if not (self._settings.supervisor.measure_threads and is_small):
            return None
        return self.measurements(found.path, engine).read()

    def measurements(self, path: Path, engine: Engine) -> MeasurementStore:
        """The speeds of a model file with an engine."""
        return MeasurementStore(self._directories.cache, path, engine.path, machine.read())

    def _machine(self) -> Machine:
        here = machine.read()
        budget = self._settings.supervisor.memory_budget
        return replace(here, memory_bytes=min(budget or here.memory_bytes, here.memory_bytes))

    def fingerprint(self, place: ReplicaId, engine: Engine) -> LaunchFingerprint:
        """Return the fingerprint of a replica's next launch. Missing files are not an error.

        Raises:
            NoSuchModel, SettingsInvalid: Its model, or its profile, is missing or invalid.
        """
        entry = self._entry_at(place)
        under = self.tuned_profiles.profile(entry)
        return LaunchFingerprint(
            engine=file_version(engine.path),
            library_dirs=engine.library_dirs,
            model=file_version(entry.path),
            draft=self._draft_version(entry, under, engine),
            projector=self._projector_version(entry, under),
            flags={**under.flags, **entry.flags},
            args=entry.args,
            batching=entry.batching,
            workers=self.workers.fingerprint(entry.name),
            adapters=tuple(file_version(one.path) for one in entry.loras),
        )

    def _draft_version(
        self, entry: ModelEntry, under: Profile, engine: Engine
    ) -> FileVersion | None:
        if isinstance(entry.draft, Path):
            return file_version(entry.draft)
        with suppress(CorralError):
            model = metadata.read(entry.path, cache_dir=self._directories.cache)
            found = self._draft(entry, under, engine, model)
            return file_version(found.gguf.path) if found.gguf else None
        return None

    def _draft(self, entry: ModelEntry, under: Profile, engine: Engine, model: Gguf) -> Draft:
        flags = {**under.flags, **entry.flags}
        return draft_model.choose(
            entry.draft,
            model,
            cache_dir=self._directories.cache,
            spec_types=offered_types(engine.flags),
            takes_heads=flags.get("spec-type") == AUTO and "spec-draft-model" not in flags,
        )

    def projector(self, model: str) -> Path | None:
        """Find the projector with which a model is served; raises as `plan`."""
        entry = self.entry(model)
        under = self.tuned_profiles.profile(entry)
        if set_path := {**under.flags, **entry.flags}.get(projectors.FLAG):
            return Path(str(set_path))
        return self._projector(entry, under, self.gguf(model)).path

    def _projector(self, entry: ModelEntry, under: Profile, model: Gguf) -> Projector:
        flags = {**under.flags, **entry.flags}
        if not projectors.is_looked_for(model, flags, entry.args):
            return Projector()
        return beside(model, self._directories.cache)

    def _projector_version(self, entry: ModelEntry, under: Profile) -> FileVersion | None:
        with suppress(CorralError):
            model = metadata.read(entry.path, cache_dir=self._directories.cache)
            found = self._projector(entry, under, model).path
            return file_version(found) if found else None
        return None

    def _adapters(self, entry: ModelEntry, model: Gguf) -> list[Gguf]:
        """Read the adapters of a model; raises SettingsInvalid or ModelInvalid."""
        found = [metadata.read(one.path, cache_dir=self._directories.cache) for one in entry.loras]
        for one, gguf in zip(entry.loras, found, strict=True):
            loras.check(one.name, gguf, model)
        return found

    @property
    def default_model(self) -> str | None:
        """The name that a request without one means."""
        return self._settings.proxy.default_model

    @property
    def supervisor(self) -> SupervisorSettings:
        return self._settings.supervisor

    def model_settings(self, model: str) -> ModelSettings:
        return self._settings.models[self.entry(model).name]

    def restart_policy(self, model: str) -> RestartPolicy:
        return self._settings.restart_policy(self.entry(model).name)

    def entry(self, model: str) -> ModelEntry:
        """Look up a model; raises NoSuchModel."""
        if model in self.entries:
            return self.entries[model]
        known = ", ".join(self.entries) or "none"
        raise NoSuchModel(f"no model is named {model!r}", hint=f"models: {known}")

    def launch(self, plan: Plan, instance: str, shards: ShardRun | None = None) -> Launch:
        """Make one run of a plan, with a random key and its own socket or port.

        The engine reaches its workers through the relays of `shards`, if there are any.

        Raises:
            SettingsInvalid: A warm prompt is missing.
            AccessDenied: The log directory cannot be used.
        """
        endpoint = self._endpoint(plan.engine, instance)
        api_key = secrets.token_hex(16)
        rpc = ",".join(map(str, shards.addresses)) if shards else None
        argv = (*_argv(plan, endpoint, rpc), *self.slot_persistence.prepare(plan, instance))
        return Launch(
            argv=argv,
            env=clean_environment(
                os.environ,
                program=plan.engine.path,
                library_dirs=plan.engine.library_dirs,
                api_key=api_key,
                marker=ProcessTag(self._directories.runtime, instance, Path(argv[0])).text,
            ),
            cwd=plan.engine.path.parent,
            endpoint=endpoint,
            api_key=api_key,
            log_path=make_private(self._directories.log) / f"{instance}.log",
            prompts=self._prompts(plan.model),
            has_prompt_cache=plan.has_prompt_cache,
            surroundings=shards.serve if shards else nullcontext,
        )

    def _prompts(self, model: str) -> tuple[WarmPrompt, ...]:
        table = self._settings.models[model]
        learned = self.learned.prompts(model) if table.learn_prompts else []
        found = (*map(prompts.read, table.warm_prompts), *learned)
        return tuple(replace(one, body=self._without_adapters(model, one.body)) for one in found)

    def _without_adapters(self, model: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        adapters = adapters_of(self.entry(model).loras)
        return with_adapter(body, adapters, "") if adapters else body

    def learns_prompts(self, model: str) -> bool:
        table = self._settings.models.get(model)
        return table is not None and table.learn_prompts

    def launch_argv(self, plan: Plan, instance: str) -> tuple[str, ...]:
        argv = _argv(plan, self._endpoint(plan.engine, instance))
        return (*argv, *self.slot_persistence.arguments(plan, instance))

    def _endpoint(self, engine: Engine, instance: str) -> Endpoint:
        socket = self._directories.engine_socket(instance) if unix_sockets(engine) else None
        return Endpoint(socket=socket, host=_LOOPBACK, port=0)


def adapters_of(found: Sequence[Lora]) -> tuple[Adapter, ...]:
    """Return the adapters of a model as the proxy knows them."""
    return tuple(Adapter(one.name, one.scale) for one in found)


def _size_bytes(paths: Iterable[object]) -> int:
    return sum(file_version(Path(str(path))).size_bytes or 0 for path in paths if path)


def file_version(path: Path) -> FileVersion:
    try:
        found = path.stat()
    except (OSError, ValueError):  # missing, or not a path
        return FileVersion(path)
    return FileVersion(path, found.st_size, found.st_mtime_ns)


def _argv(plan: Plan, endpoint: Endpoint, rpc: str | None = None) -> tuple[str, ...]:
    if endpoint.socket:
        return plan.argv(host=str(endpoint.socket), port=None, rpc=rpc)
    return plan.argv(host=endpoint.host, port=endpoint.port, rpc=rpc)


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
        loras=loras.loras_of(model.loras),
    )
