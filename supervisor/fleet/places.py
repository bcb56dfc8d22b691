"""How many instances each model has, and which of them is on trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from supervisor.errors import CorralError
from supervisor.flags.plan import ModelEntry, Plan
from supervisor.flags.trial import CanaryTrial, TrialSettings
from supervisor.fleet.entries import entry_named
from supervisor.fleet.launch_id import ReplicaId
from supervisor.fleet.tuned_profiles import TunedProfiles
from supervisor.host import machine
from supervisor.memory.fit import capacity
from supervisor.memory.replicas import Replicas, decide
from supervisor.settings.schema import FoundModel, Settings


class Places:
    """The replicas of the models in one version of the settings.

    Args:
        entries: All models by name.
        plan: Plans a model as if this many instances shared the machine; raises CorralError.
    """

    def __init__(
        self,
        settings: Settings,
        entries: Mapping[str, ModelEntry],
        tuned_profiles: TunedProfiles,
        plan: Callable[[ModelEntry, int], Plan],
    ) -> None:
        self._settings = settings
        self._entries = entries
        self._tuned_profiles = tuned_profiles
        self._plan = plan
        self._replicas: dict[str, Replicas] = {}

    @cached_property  # every plan reads it: counting each time would be quadratic in the models
    def instances(self) -> int:
        """The number of processes that share the machine if all models are loaded.

        Models that were found count as one. A canary is not counted: it would run with other
        threads and batches than what it is compared with.
        """
        table = self._settings.models
        found = [name for name in self._entries if isinstance(table[name], FoundModel)]
        own = [name for name in self._entries if not isinstance(table[name], FoundModel)]
        canaries = sum(isinstance(self.trial(name), CanaryTrial) for name in own)
        return sum(len(self.of(name)) for name in own) - canaries + bool(found)

    def of(self, model: str) -> tuple[ReplicaId, ...]:
        """Return the replicas of a model, the one on trial last."""
        count = self.replicas(model).count + (self.trial(model) is not None)
        return tuple(ReplicaId(model, number) for number in range(count))

    def trial(self, model: str) -> TrialSettings | None:
        return self._settings.models[entry_named(self._entries, model).name].trial

    def trial_at(self, place: ReplicaId) -> TrialSettings | None:
        """Return the trial that a replica runs; None for one that runs the model's own profile."""
        is_trial = place.number >= self.replicas(place.model).count
        return self.trial(place.model) if is_trial else None

    def replicas(self, model: str) -> Replicas:
        """Return how many instances run a model's own profile; decided once.

        Raises:
            NoSuchModel: The settings have none of that name.
        """
        if model not in self._replicas:
            self._replicas[model] = self._count(entry_named(self._entries, model))
        return self._replicas[model]

    def _count(self, entry: ModelEntry) -> Replicas:
        if self._settings.models[entry.name].workers:
            return Replicas(1, "a worker serves one engine at a time")
        is_set = "replicas" in self._settings.models[entry.name].model_fields_set
        if not is_set and (count := self._tuned_profiles.replicas(entry)):
            return Replicas(count, "tuned")
        if entry.replicas != "auto":
            return Replicas(entry.replicas, "as set")
        return self._decide(entry)

    def _decide(self, entry: ModelEntry) -> Replicas:
        models = len(self._entries)
        try:
            plan = self._plan(entry, models)
        except CorralError:
            return Replicas(1, "it cannot be planned")  # its start reports why
        here, budget = machine.read(), self._settings.supervisor.memory_budget
        free = capacity(here, plan.engine.devices, budget)
        return decide(plan.memory_inputs, here, free, models)
