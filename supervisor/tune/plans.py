"""Plans variants of a model exactly as the daemon will run them once they are written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from supervisor.errors import CorralError
from supervisor.flags import tuned
from supervisor.flags.plan import Plan
from supervisor.flags.tuned import Evidence, Tuned
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host import machine
from supervisor.host.paths import Directories
from supervisor.memory.fit import misfit_reason
from supervisor.output import size
from supervisor.settings.schema import Settings
from supervisor.tune.variant import BASE, Variant


@dataclass(frozen=True, slots=True)
class PlannedVariant:
    """The plan of one instance, and how many run."""

    plan: Plan
    replicas: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a variant is not measured, as a clause."""

    reason: str


class VariantPlans:
    """The plans of one search; each is made once, so that all rounds measure the same."""

    def __init__(self, settings: Settings, directories: Directories, model: str) -> None:
        alone = settings.models[model].model_copy(update={"trial": None})
        self._settings = settings.model_copy(update={"models": {**settings.models, model: alone}})
        self._directories = directories
        self.model = model
        self._plans: dict[Variant, PlannedVariant] = {}
        self.profile = settings.models[model].profile
        self.base = self.plan(BASE)

    def plan(self, variant: Variant) -> PlannedVariant:
        """Plan a variant; raises CorralError."""
        if variant not in self._plans:
            planner = self._planner(variant)
            count = planner.places.replicas(self.model).count
            self._plans[variant] = PlannedVariant(planner.plan(self.model), count)
        return self._plans[variant]

    def usable(self, variants: tuple[Variant, ...]) -> dict[Variant, Unusable | None]:
        """Which variants can be measured: those that fit, and each command line once."""
        seen = {_identity(self.base)}
        found: dict[Variant, Unusable | None] = {}
        for one in variants:
            found[one] = self.reason_against(one)
            if found[one] is None:
                identity = _identity(self.plan(one))
                found[one] = Unusable("it changes nothing here") if identity in seen else None
                seen.add(identity)
        return found

    def reason_against(self, variant: Variant) -> Unusable | None:
        """Why a variant cannot be measured now, or None."""
        try:
            planned = self.plan(variant)
        except CorralError as error:
            return Unusable(error.message)
        omitted = {line.flag.removeprefix("--").removeprefix("no-"): line.reason
                   for line in planned.plan.omitted}  # fmt: skip
        for key, _ in variant.flags:
            if key in omitted:
                return Unusable(omitted[key])
        return self._misfit(planned)

    def _misfit(self, planned: PlannedVariant) -> Unusable | None:
        found = planned.plan.estimate
        capacity = self._planner(BASE).capacity(planned.plan.engine)
        if reason := misfit_reason(found, capacity):
            return Unusable(reason)
        needed = found.own_at_start_bytes * planned.replicas + found.mapped_bytes
        free = min(machine.read().memory_available_bytes, capacity.host)
        if needed > free:
            return Unusable(f"it needs {size(needed)} of main memory, and {size(free)} are free")
        return None

    def _planner(self, variant: Variant) -> LaunchPlanner:
        own = Tuned(
            model=self.model,
            path=Path(),
            extends=None,
            flags=MappingProxyType(dict(variant.flags)),
            replicas=variant.replicas,
            evidence=Evidence(),
        )

        def read(name: str) -> Tuned | None:
            if name == self.model:
                return own
            return tuned.read(name, self._directories.tuned_profiles)

        return LaunchPlanner(self._settings, self._directories, read_tuned=read)


def _identity(planned: PlannedVariant) -> tuple[int, frozenset[tuple[str, str | None]]]:
    return planned.replicas, frozenset((line.flag, line.value) for line in planned.plan.lines)
