"""Plans and launches instances from the settings; every run gets a new plan.

So the next start uses a repaired model file or an upgraded engine. Planning takes milliseconds:
engines and GGUFs are cached by path, size and mtime.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor.builds import discover
from supervisor.builds.discover import Engine
from supervisor.builds.help import has_draft_cache
from supervisor.builds.installed import EngineSetting
from supervisor.engine.calibration import MeasurementStore
from supervisor.fleet.launches import (
    Launches,
    LaunchFingerprint,
    ModelFiles,
    ReplicaId,
    total_bytes,
    version_of,
)
from supervisor.fleet.model_entries import (
    Places,
    ReadTuned,
    Reductions,
    TunedProfiles,
    entries_of,
    find_entry,
)
from supervisor.models.local_stores import roots
from supervisor.models.metadata import Gguf
from supervisor.plan.auto import SLOTS, ThreadSpeeds
from supervisor.plan.embedding import FLAG as PROJECTOR
from supervisor.plan.estimate import with_free
from supervisor.plan.fit import MemoryCapacity, capacity, check_fits
from supervisor.plan.loras import check_files
from supervisor.plan.plan import Plan, TrialSettings, extend_context, make_plan
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import SettingsByFlag as FlagSettings
from supervisor.rpc.address import KnownWorkers
from supervisor.rpc.model_workers import ModelWorkers
from supervisor.rpc.relay import ShardRun
from supervisor.rpc.shards import LayerShares, shard_plans, worker_split
from supervisor.settings.schema import ModelSettings, Settings, SupervisorSettings
from supervisor.settings.tables import RestartPolicy
from supervisor.system import machine
from supervisor.system.machine import Machine
from supervisor.system.paths import Directories

# Larger models take longer to load, and lose less time to the synchronisation of threads.
_MEASURED_MAX_BYTES: Final = 1024**3


class LaunchPlanner:
    """Plans and launches the instances of one version of the settings.

    `adapted` has the values of models that the daemon changed while it serves, `read_tuned`
    reads tuned profiles that are not files. `known_workers` is the knowledge about workers,
    `reductions` has the models whose engines ran out of memory; both are empty by default.
    """

    def __init__(
        self,
        settings: Settings,
        directories: Directories,
        adapted: Mapping[str, FlagSettings] = MappingProxyType({}),
        *,
        read_tuned: ReadTuned | None = None,
        known_workers: KnownWorkers | None = None,
        reductions: Reductions | None = None,
    ) -> None:
        self.adapted = adapted
        self.reductions = reductions or Reductions()
        self.settings = settings
        self._directories = directories
        self.tuned_profiles = TunedProfiles(directories, read_tuned)
        self.entries: Mapping[str, ModelEntry] = entries_of(settings)
        self.launches = Launches(settings, directories)
        self.places = Places(settings, self.entries, self.tuned_profiles, self._plan_to_count)
        self._files = ModelFiles(directories.cache, roots(directories.models, settings.models_dirs))
        self.workers = ModelWorkers(settings, known_workers or KnownWorkers())
        self._layer_shares = LayerShares(directories.layer_shares)
        self._layers: Mapping[str, Mapping[str, int]] = {}
        self._read_machine: Callable[[], Machine] = machine.read
        self._load: Callable[[EngineSetting | None], Engine] = lambda setting: discover.load(
            setting,
            cache_dir=directories.cache,
            places=discover.default_search_paths(directories.engines),
        )

    def reading_once(self) -> LaunchPlanner:
        """Return a planner for many models, which reads each source once; do not keep it."""
        other = copy.copy(self)
        other._read_machine = cache(self._read_machine)  # noqa: SLF001 (a copy of this one)
        other._load = cache(self._load)  # noqa: SLF001 (a copy of this one)
        other.tuned_profiles = self.tuned_profiles.reading_once()
        return other

    def adapting(self, model: str, to: FlagSettings) -> LaunchPlanner:
        other = copy.copy(self)
        other.adapted = {**self.adapted, model: to}
        return other

    def reductions_of(self, model: str) -> FlagSettings:
        """Return the values that replace planned ones because the engine ran out of memory."""
        return self.reductions.find(self.entries[model])[1] if self.may_reduce(model) else {}

    def may_reduce(self, model: str) -> bool:
        found = self.settings.models.get(model)
        return found is not None and found.on_out_of_memory == "reduce"

    def without_reductions(self) -> LaunchPlanner:
        other = copy.copy(self)
        other.reductions = Reductions()
        return other

    def with_layers(self, model: str, layers: Mapping[str, int]) -> LaunchPlanner:
        other = copy.copy(self)
        other._layers = {**self._layers, model: layers}  # noqa: SLF001 (a copy of this one)
        return other

    def engine(self) -> Engine:
        """Find the engine of models without their own; if all have one, that of the first model.

        Raises EngineMissing, EngineBroken: there is no engine, or it does not run.
        """
        own = [model.engine for model in self.settings.models.values()]
        return self._load(self.settings.engine or (own[0] if own and all(own) else None))

    def engine_of(self, entry: ModelEntry) -> Engine:
        """Find the engine of a model; raises as `engine`."""
        if entry.engine is None:
            return self.engine()
        return self._load(entry.engine)

    def engine_at(self, place: ReplicaId) -> Engine:
        """Find the engine of a replica; raises as `engine`."""
        return self.engine_of(self._entry_at(place))

    def _entry_at(self, place: ReplicaId) -> ModelEntry:
        entry, trial = self.entry(place.model), self.places.trial_at(place)
        return trial.apply_to(entry) if trial else entry

    def gguf(self, model: str) -> Gguf:
        """Read the metadata of a model's file; raises NoSuchModel or ModelInvalid."""
        return self._files.gguf(self.entry(model))

    def plan(self, model: str) -> Plan:
        """Plan a model's instances; reads files.

        Raises NoSuchModel, EngineMissing, EngineBroken, ModelInvalid, SettingsInvalid: it cannot
        run.
        """
        entry = self.entry(model)
        return self._plan(entry, self.adapted.get(model, {}))

    def plan_trial(self, model: str, trial: TrialSettings) -> Plan:
        """Plan the replica on trial, as `plan` does; its slots are at least as long as the model's.

        It gets the same share of the machine. Its number of slots does not follow demand, except if
        only its engine is on trial: then it is the model's present one.
        """
        entry, adapted = trial.apply_to(self.entry(model)), self.adapted.get(model, {})
        if trial.profile or trial.flags:
            adapted = {key: setting for key, setting in adapted.items() if key != SLOTS}
        plan = self._plan(entry, adapted)
        longer = extend_context(entry, self.plan(model), plan)
        return self._plan(longer, adapted) if longer else plan

    def plan_at(self, place: ReplicaId, free: Mapping[str, int] = MappingProxyType({})) -> Plan:
        """Plan one replica as `plan` does; `free` is free bytes by device. Raises OutOfMemory."""
        devices = self.places.replicas(place.model).devices
        if trial := self.places.trial_at(place):
            plan = self.plan_trial(place.model, trial)
        elif place.number < len(devices):
            entry = self.entry(place.model)
            flags = {**entry.flags, "device": devices[place.number]}
            plan = self._plan(replace(entry, flags=flags), self.adapted.get(place.model, {}))
        else:
            plan = self.plan(place.model)
        check_fits(place.model, plan.memory_inputs, self.capacity(plan.engine))
        return replace(plan, memory_inputs=with_free(plan.memory_inputs, free))

    def capacity(self, engine: Engine) -> MemoryCapacity:
        return capacity(
            self._read_machine(), engine.devices, self.settings.supervisor.memory_budget
        )

    @cached_property
    def _counting(self) -> LaunchPlanner:
        return self.reading_once()

    def _plan_to_count(self, entry: ModelEntry, instances: int) -> tuple[Plan, Machine]:
        """Plan a model without adapted values, on the machine as it was for the first such plan."""
        once = self._counting
        return once._plan(entry, {}, instances=instances), once._read_machine()  # noqa: SLF001

    def _plan(
        self, entry: ModelEntry, adapted: FlagSettings, *, instances: int | None = None
    ) -> Plan:
        """Plan a model; `instances` share the machine, by default those of the settings."""
        engine, here = self.engine_of(entry), self._read_machine()
        budget_bytes = self.settings.supervisor.memory_budget or here.memory_bytes
        here = replace(here, memory_bytes=min(budget_bytes, here.memory_bytes))
        workers = self.workers.used_by(entry.name, engine, here)
        entry = replace(entry, workers=workers, reduced=self.reductions_of(entry.name))
        under = self.tuned_profiles.profile(entry)
        flags, found = {**under.flags, **entry.flags}, self._files.gguf(entry)
        projector, skipped = self._files.projector(entry, flags, found)
        entry = replace(entry, split=self._split(entry, found), projector=projector)
        adapters = self._files.adapters(entry, found)
        beside = [flags.get(PROJECTOR, projector), *(adapter.path for adapter in adapters)]
        make = partial(
            make_plan,
            entry,
            under,
            engine,
            found,
            here,
            instances=instances or max(1, self.places.instances),
            draft=self._files.draft(entry, flags, engine, found),
            projector_bytes=total_bytes(beside),
            adapted=adapted,
            measured=None if entry.workers else self._read_measurement(found, engine),
        )
        plan = make()
        has_draft = has_draft_cache(plan.memory_inputs.chosen)
        if has_draft and self.launches.slot_persistence.reason(plan):
            plan = make(saves_slots=False)
        check_files(entry.name, entry.flags, self.entry(entry.name).flags)
        tuned, lost = self.tuned_profiles.warnings(entry, plan), self.workers.loss_notes(entry.name)
        assumed = self.workers.assumption_notes(entry.name)
        warnings = (*plan.warnings, *skipped, *tuned, *lost, *assumed)
        return replace(plan, warnings=warnings, lost_workers=lost)

    def projector(self, model: str) -> Path | None:
        """Find the projector of a model; raises as `plan`."""
        entry = self.entry(model)
        flags = {**self.tuned_profiles.profile(entry).flags, **entry.flags}
        if set_path := flags.get(PROJECTOR):
            return Path(str(set_path))
        return self._files.projector(entry, flags, self.gguf(model))[0]

    def _split(self, entry: ModelEntry, found: Gguf) -> str | None:
        """Return the `--tensor-split` of a model whose layers were moved between workers."""
        names = [worker.name for worker in entry.workers]
        layers = self._layers.get(entry.name)
        if layers is None or layers.keys() != set(names):
            layers = self._layer_shares.layers(entry.name, names, found.layers)
        return worker_split(entry.workers, layers) if layers else None

    def shards(self, plan: Plan) -> ShardRun | None:
        """Make the relays that measure the workers of a run; None without workers."""
        plans = shard_plans(plan, self.workers.addresses(plan.model))
        return ShardRun(plans, self.settings.balance) if plans else None

    def _read_measurement(self, found: Gguf, engine: Engine) -> Mapping[int, ThreadSpeeds] | None:
        is_small = found.tensor_bytes <= _MEASURED_MAX_BYTES
        if not (self.settings.supervisor.measure_threads and is_small):
            return None
        return self.measurements(found.path, engine).read()

    def measurements(self, path: Path, engine: Engine) -> MeasurementStore:
        return MeasurementStore(self._directories.cache, path, engine.path, self._read_machine())

    def fingerprint(self, place: ReplicaId, engine: Engine) -> LaunchFingerprint:
        """Return the fingerprint of a replica's next launch. Missing files are not an error.

        Raises NoSuchModel, SettingsInvalid: its model or its profile is missing or invalid.
        """
        entry = self._entry_at(place)
        flags = {**self.tuned_profiles.profile(entry).flags, **entry.flags}
        return LaunchFingerprint(
            engine=version_of(engine.path),
            library_dirs=engine.library_dirs,
            model=self._files.version(entry.path),
            draft=self._files.draft_version(entry, flags, engine),
            projector=self._files.projector_version(entry, flags),
            flags=flags,
            args=entry.args,
            batching=entry.batching,
            workers=self.workers.fingerprint(entry.name),
            adapters=tuple(version_of(lora.path) for lora in entry.loras.values()),
            spool=self.launches.slot_persistence.memory_spool,
        )

    @property
    def supervisor(self) -> SupervisorSettings:
        return self.settings.supervisor

    def model_settings(self, model: str) -> ModelSettings:
        return self.settings.models[self.entry(model).name]

    def restart_policy(self, model: str) -> RestartPolicy:
        return self.settings.restart_policy(self.entry(model).name)

    def entry(self, model: str) -> ModelEntry:
        """Look up a model; raises NoSuchModel."""
        return find_entry(self.entries, model)
