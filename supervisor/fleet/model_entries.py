"""The models of the settings in the form for plans; their tuned profiles, reductions, replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, cached_property

from supervisor.builds.help import FlagValue
from supervisor.errors import CorralError, NoSuchModel
from supervisor.fleet.launches import ReplicaId
from supervisor.plan import profile, tuned_profile
from supervisor.plan.fit import capacity
from supervisor.plan.loras import loras_of
from supervisor.plan.plan import CanaryTrial, Plan, TrialSettings
from supervisor.plan.profile import Profile
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import CORRAL, Setting, SettingsByFlag
from supervisor.plan.shortage import Kind, Replicas, decide
from supervisor.plan.tuned_profile import Tuned
from supervisor.settings.schema import FoundModel, Settings
from supervisor.system import machine
from supervisor.system.machine import Machine, cpu_name
from supervisor.system.paths import Directories


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
        )
        for name, model in settings.models.items()
    }


def find_entry(entries: Mapping[str, ModelEntry], model: str) -> ModelEntry:
    """Look up a model; raises NoSuchModel."""
    if model in entries:
        return entries[model]
    known = ", ".join(entries) or "none"
    raise NoSuchModel(f"no model is named {model!r}", hint=f"models: {known}")


# Returns the tuned profile of a model, if it has one.
ReadTuned = Callable[[str], Tuned | None]


class TunedProfiles:
    """The profiles of models, with the tuned profiles that apply on this machine."""

    def __init__(self, directories: Directories, read: ReadTuned | None = None) -> None:
        self._read = read or (lambda name: tuned_profile.read(name, directories.tuned_profiles))
        self._load: Callable[[str], Profile] = lambda name: profile.load(name, directories.profiles)

    def reading_once(self) -> TunedProfiles:
        """Return a copy that reads each profile once, except tuned ones."""
        other = copy.copy(self)
        other._load = cache(self._load)  # noqa: SLF001 (a copy of this one)
        return other

    def find_applicable(self, entry: ModelEntry) -> Tuned | None:
        """Return a model's tuned profile if it applies; raises SettingsInvalid."""
        found = self._read(entry.name)
        if found is None:
            return None
        reason = tuned_profile.reason_unused(found, entry.profile, machine_here())
        return None if reason else found

    def profile(self, entry: ModelEntry) -> Profile:
        """Load a model's profile, overlaid by its tuned profile; raises SettingsInvalid."""
        under = self._load(entry.profile)
        found = self.find_applicable(entry)
        if found is None:
            return under
        return profile.overlay_flags(under, found.flags, f"{entry.name} (tuned)")

    def replicas(self, entry: ModelEntry) -> int | None:
        """Return the tuned number of instances, if any; the start reports a broken file."""
        with suppress(CorralError):
            found = self.find_applicable(entry)
            return found.replicas if found else None
        return None

    def warnings(self, entry: ModelEntry, plan: Plan) -> tuple[str, ...]:
        found = self._read(entry.name)
        if found is None:
            return ()
        now = tuned_profile.conditions(machine_here(), plan.engine, plan.gguf)
        return tuple(tuned_profile.warnings(found, entry.profile, now))


def machine_here() -> str:
    return tuned_profile.machine_text(cpu_name(), machine.read())


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


class Places:
    """The replicas of the models in one version of the settings.

    `plan` plans one of the `entries` for a number of instances that share the machine, and returns
    the machine too; raises CorralError.
    """

    def __init__(
        self,
        settings: Settings,
        entries: Mapping[str, ModelEntry],
        tuned_profiles: TunedProfiles,
        plan: Callable[[ModelEntry, int], tuple[Plan, Machine]],
    ) -> None:
        self._settings = settings
        self._entries = entries
        self._tuned_profiles = tuned_profiles
        self._plan = plan
        self._replicas: dict[str, Replicas] = {}

    @cached_property  # every plan reads it: counting each time would be quadratic in the models
    def instances(self) -> int:
        """The number of processes that share the machine if all models are loaded.

        All found models together count as one. A canary is not counted, so that it gets the same
        threads and batches as the replicas that it is compared with.
        """
        table = self._settings.models
        found = [name for name in self._entries if isinstance(table[name], FoundModel)]
        own = [name for name in self._entries if not isinstance(table[name], FoundModel)]
        canaries = sum(isinstance(self.trial(name), CanaryTrial) for name in own)
        return sum(len(self.replicas_of(name)) for name in own) - canaries + bool(found)

    def replicas_of(self, model: str) -> tuple[ReplicaId, ...]:
        """Return the replicas of a model, the one on trial last."""
        count = self.replicas(model).count + (self.trial(model) is not None)
        return tuple(ReplicaId(model, number) for number in range(count))

    def trial(self, model: str) -> TrialSettings | None:
        return self._settings.models[find_entry(self._entries, model).name].trial

    def trial_at(self, place: ReplicaId) -> TrialSettings | None:
        """Return the trial of a replica; None if it runs the model's own profile."""
        is_trial = place.number >= self.replicas(place.model).count
        return self.trial(place.model) if is_trial else None

    def replicas(self, model: str) -> Replicas:
        """Return how many instances run a model's own profile; decided once. Raises NoSuchModel."""
        if model not in self._replicas:
            self._replicas[model] = self._count(find_entry(self._entries, model))
        return self._replicas[model]

    def _count(self, entry: ModelEntry) -> Replicas:
        if self._settings.models[entry.name].workers:
            return Replicas(1, "a worker serves one engine at a time")
        is_set = "replicas" in self._settings.models[entry.name].model_fields_set
        if not is_set and (count := self._tuned_profiles.replicas(entry)):
            return Replicas(count, "tuned")
        if entry.replicas != "auto":
            return Replicas(entry.replicas, "as set")
        models = len(self._entries)
        try:
            plan, here = self._plan(entry, models)
        except CorralError:
            return Replicas(1, "it cannot be planned")  # its start reports why
        free = capacity(here, plan.engine.devices, self._settings.supervisor.memory_budget)
        return decide(plan.memory_inputs, here, free, models)
