"""Plans and launches instances from the settings; every run gets a new plan.

So the next start uses a repaired model file or an upgraded engine. Planning takes milliseconds:
engines and GGUFs are cached by path, size and mtime.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor.builds import discover
from supervisor.builds.discover import Engine
from supervisor.builds.help import FlagValue, has_draft_cache
from supervisor.builds.installed import EngineSetting
from supervisor.engine.calibration import MeasurementStore
from supervisor.errors import CorralError, NoSuchModel
from supervisor.fleet.launches import (
    Flags,
    Launches,
    LaunchFingerprint,
    ModelFiles,
    ReplicaId,
    total_bytes,
    version_of,
)
from supervisor.models.local_stores import roots
from supervisor.models.metadata import Gguf
from supervisor.plan import draft_speed, profile, tuned_profile
from supervisor.plan.auto import AUTO, SLOTS, ThreadSpeeds
from supervisor.plan.draft import Draft
from supervisor.plan.draft_speed import SPEC_TYPE
from supervisor.plan.embedding import FLAG as PROJECTOR
from supervisor.plan.estimate import with_free
from supervisor.plan.fit import MemoryCapacity, capacity, check_fits
from supervisor.plan.loras import check_files, loras_of
from supervisor.plan.plan import CanaryTrial, Plan, TrialSettings, extend_context, make_plan
from supervisor.plan.profile import Profile
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import CORRAL, Setting, SettingsByFlag
from supervisor.plan.shortage import Kind, Replicas, decide
from supervisor.plan.tuned_profile import Tuned, machine_here
from supervisor.rpc.address import KnownWorkers
from supervisor.rpc.model_workers import ModelWorkers
from supervisor.rpc.relay import ShardRun
from supervisor.rpc.shards import LayerShares, shard_plans, worker_split
from supervisor.settings.schema import FoundModel, ModelSettings, Settings, SupervisorSettings
from supervisor.settings.tables import RestartPolicy
from supervisor.system import files, machine
from supervisor.system.machine import Machine
from supervisor.system.paths import Directories

# Larger models take longer to load, and lose less time to the synchronisation of threads.
_MEASURED_MAX_BYTES: Final = 1024**3

# A model's entry, the reduced values, the kinds that were tried, and whether less memory was free
# than the model needed. They apply until the settings change the entry.
_Reduced = tuple[ModelEntry, SettingsByFlag, tuple[Kind, ...], bool]


class Reductions:
    """The settings that models are planned with after their engines ran out of memory."""

    def __init__(self) -> None:
        self._by_model: dict[str, _Reduced] = {}

    def find(self, entry: ModelEntry) -> _Reduced:
        """Return the reductions; none once the settings have changed."""
        found = self._by_model.get(entry.name)
        return found if found and found[0] == entry else (entry, {}, (), False)

    def add(
        self,
        entry: ModelEntry,
        kind: Kind,
        flags: Mapping[str, FlagValue],
        reason: str,
        *,
        was_short: bool,
    ) -> None:
        _, before, kinds, _ = self.find(entry)
        settings = {key: Setting(value, CORRAL, reason) for key, value in flags.items()}
        self._by_model[entry.name] = entry, {**before, **settings}, (*kinds, kind), was_short

    def set(self, entry: ModelEntry, settings: SettingsByFlag) -> None:
        """Set the reductions of another process."""
        self._by_model[entry.name] = entry, settings, (), False

    def forget(self, model: str) -> None:
        self._by_model.pop(model, None)


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
        adapted: Mapping[str, SettingsByFlag] = MappingProxyType({}),
        *,
        read_tuned: Callable[[str], Tuned | None] | None = None,
        known_workers: KnownWorkers | None = None,
        reductions: Reductions | None = None,
    ) -> None:
        self.adapted = adapted
        self.reductions = reductions or Reductions()
        self.settings = settings
        self._directories = directories
        self.entries: Mapping[str, ModelEntry] = entries_of(settings)
        self.launches = Launches(settings, directories)
        self._replicas: dict[str, Replicas] = {}
        self._files = ModelFiles(directories.cache, roots(directories.models, settings.models_dirs))
        self.workers = ModelWorkers(settings, known_workers or KnownWorkers())
        self._layer_shares = LayerShares(directories.layer_shares)
        self._layers: Mapping[str, Mapping[str, int]] = {}
        self._read_machine: Callable[[], Machine] = machine.read
        self._read_tuned = read_tuned or (
            lambda name: tuned_profile.read(name, directories.tuned_profiles)
        )
        self._load_profile: Callable[[str], Profile] = lambda name: profile.load(
            name, directories.profiles
        )
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
        other._load_profile = cache(self._load_profile)  # noqa: SLF001 (a copy of this one)
        return other

    def adapting(self, model: str, to: SettingsByFlag) -> LaunchPlanner:
        other = copy.copy(self)
        other.adapted = {**self.adapted, model: to}
        return other

    def reductions_of(self, model: str) -> SettingsByFlag:
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
        return self._load(entry.engine) if entry.engine else self.engine()

    def engine_at(self, place: ReplicaId) -> Engine:
        """Find the engine of a replica; raises as `engine`."""
        return self.engine_of(self._entry_at(place))

    def _entry_at(self, place: ReplicaId) -> ModelEntry:
        entry, trial = self.entry(place.model), self.trial_at(place)
        return trial.apply_to(entry) if trial else entry

    def gguf(self, model: str) -> Gguf:
        """Read the metadata of a model's file; raises NoSuchModel or ModelInvalid."""
        return self._files.gguf(self.entry(model))

    def plan(self, model: str) -> Plan:
        """Plan a model's instances; reads files.

        Raises NoSuchModel, EngineMissing, EngineBroken, ModelInvalid, SettingsInvalid: it cannot
        run.
        """
        return self._plan(self.entry(model), self.adapted.get(model, {}))

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
        devices = self.replicas(place.model).devices
        if trial := self.trial_at(place):
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

    # The replicas of models.

    @cached_property  # every plan reads it: counting each time would be quadratic in the models
    def instances(self) -> int:
        """The number of processes that share the machine if all models are loaded.

        All found models together count as one. A canary is not counted, so that it gets the same
        threads and batches as the replicas that it is compared with.
        """
        table = self.settings.models
        own = [name for name in self.entries if not isinstance(table[name], FoundModel)]
        canaries = sum(isinstance(self.trial(name), CanaryTrial) for name in own)
        has_found = len(own) < len(self.entries)
        return sum(len(self.replicas_of(name)) for name in own) - canaries + has_found

    def replicas_of(self, model: str) -> tuple[ReplicaId, ...]:
        """Return the replicas of a model, the one on trial last."""
        count = self.replicas(model).count + (self.trial(model) is not None)
        return tuple(ReplicaId(model, number) for number in range(count))

    def trial(self, model: str) -> TrialSettings | None:
        return self.model_settings(model).trial

    def trial_at(self, place: ReplicaId) -> TrialSettings | None:
        """Return the trial of a replica; None if it runs the model's own profile."""
        is_trial = place.number >= self.replicas(place.model).count
        return self.trial(place.model) if is_trial else None

    def replicas(self, model: str) -> Replicas:
        """Return how many instances run a model's own profile; decided once. Raises NoSuchModel."""
        if model not in self._replicas:
            self._replicas[model] = self._count(self.entry(model))
        return self._replicas[model]

    def _count(self, entry: ModelEntry) -> Replicas:
        table = self.settings.models[entry.name]
        if table.workers:
            return Replicas(1, "a worker serves one engine at a time")
        if "replicas" not in table.model_fields_set:
            with suppress(CorralError):  # its start reports a broken file
                if (tuned := self.tuned(entry)) and tuned.replicas:
                    return Replicas(tuned.replicas, "tuned")
        if entry.replicas != "auto":
            return Replicas(entry.replicas, "as set")
        once, models = self._counting, len(self.entries)
        try:
            plan = once._plan(entry, {}, instances=models)  # noqa: SLF001 (a copy of this one)
        except CorralError:
            return Replicas(1, "it cannot be planned")  # its start reports why
        here = once._read_machine()  # noqa: SLF001 (as above)
        return decide(plan.memory_inputs, here, once.capacity(plan.engine), models)

    @cached_property
    def _counting(self) -> LaunchPlanner:
        """Plans without adapted values, for the machine's state at the first such plan."""
        return self.reading_once()

    # Profiles.

    def tuned(self, entry: ModelEntry) -> Tuned | None:
        """Return a model's tuned profile if it applies on this machine; raises SettingsInvalid."""
        found = self._read_tuned(entry.name)
        if found and tuned_profile.reason_unused(found, entry.profile, machine_here()):
            return None
        return found

    def profile(self, entry: ModelEntry) -> Profile:
        """Load a model's profile, overlaid by its tuned profile; raises SettingsInvalid."""
        under, found = self._load_profile(entry.profile), self.tuned(entry)
        if found is None:
            return under
        return profile.overlay_flags(under, found.flags, f"{entry.name} (tuned)")

    def _tuned_warnings(self, entry: ModelEntry, plan: Plan) -> Iterator[str]:
        if found := self._read_tuned(entry.name):
            now = tuned_profile.conditions(machine_here(), plan.engine, plan.gguf)
            yield from tuned_profile.warnings(found, entry.profile, now)

    def _plan(
        self, entry: ModelEntry, adapted: SettingsByFlag, *, instances: int | None = None
    ) -> Plan:
        """Plan a model; `instances` share the machine, by default those of the settings."""
        engine, here = self.engine_of(entry), self._read_machine()
        budget_bytes = self.settings.supervisor.memory_budget or here.memory_bytes
        here = replace(here, memory_bytes=min(budget_bytes, here.memory_bytes))
        workers = self.workers.used_by(entry.name, engine, here)
        entry = replace(entry, workers=workers, reduced=self.reductions_of(entry.name))
        under = self.profile(entry)
        flags, found = {**under.flags, **entry.flags}, self._files.gguf(entry)
        projector, skipped = self._files.projector(entry, flags, found)
        entry = replace(entry, split=self._split(entry, found), projector=projector)
        adapters = self._files.adapters(entry, found)
        draft = self._files.draft(entry, flags, engine, found)
        draft_key = self._draft_key(entry, flags, engine, found, draft)
        if setting := self._draft_setting(draft_key):
            adapted = {SPEC_TYPE: setting, **adapted}
        beside = [flags.get(PROJECTOR, projector), *(adapter.path for adapter in adapters)]
        make = partial(
            make_plan,
            entry,
            under,
            engine,
            found,
            here,
            instances=instances or max(1, self.instances),
            draft=draft,
            projector_bytes=total_bytes(beside),
            adapted=adapted,
            measured=None if entry.workers else self._read_measurement(found, engine),
        )
        plan = make()
        has_draft = has_draft_cache(plan.memory_inputs.chosen)
        if has_draft and self.launches.slot_persistence.reason(plan):
            plan = make(saves_slots=False)
        inputs = plan.memory_inputs
        if inputs.draft is None and (named := self._files.draft_of_flag(inputs.chosen)):
            plan = replace(plan, memory_inputs=replace(inputs, draft=named))
        check_files(entry.name, entry.flags, self.entry(entry.name).flags)
        tuned, lost = (*self._tuned_warnings(entry, plan),), self.workers.loss_notes(entry.name)
        assumed = self.workers.assumption_notes(entry.name)
        warnings = (*plan.warnings, *skipped, *tuned, *lost, *assumed)
        draft_key = draft_key if SPEC_TYPE in plan.derived - plan.from_user else None
        return replace(plan, warnings=warnings, lost_workers=lost, tuned=tuned, draft_key=draft_key)

    def _draft_key(
        self, entry: ModelEntry, flags: Flags, engine: Engine, found: Gguf, draft: Draft
    ) -> str | None:
        """Return the name of the speeds with and without drafts; None if they are not measured."""
        if not (self.supervisor.adaptive and (draft.gguf or flags.get(SPEC_TYPE) == AUTO)):
            return None
        paths = [found.path, engine.path, *([draft.gguf.path] if draft.gguf else [])]
        with suppress(OSError):
            return files.key_of(paths, entry.name, repr(sorted(flags.items())), *entry.args)
        return None

    def _draft_setting(self, draft_key: str | None) -> Setting | None:
        """Return whether a model drafts by its speeds, as its value of `spec-type`."""
        speed = draft_speed.read(self._directories.draft_speeds, draft_key) if draft_key else None
        return speed.setting if speed else None

    def projector(self, model: str) -> Path | None:
        """Find the projector of a model; raises as `plan`."""
        entry = self.entry(model)
        flags = {**self.profile(entry).flags, **entry.flags}
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
        flags = {**self.profile(entry).flags, **entry.flags}
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
        if model in self.entries:
            return self.entries[model]
        known = ", ".join(self.entries) or "none"
        raise NoSuchModel(f"no model is named {model!r}", hint=f"models: {known}")


def entries_of(settings: Settings) -> dict[str, ModelEntry]:
    return {
        name: ModelEntry(
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
            serves_ui=settings.proxy.engine_ui is not None,
            runs_tools=model.engine_tools,
        )
        for name, model in settings.models.items()
    }
