"""The variants of a bench, and whether the machine is free enough to measure them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from supervisor.builds.help import FlagValue
from supervisor.errors import MachineBusy
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import size
from supervisor.plan.fit import MemoryCapacity, misfit_reason
from supervisor.plan.plan import Plan
from supervisor.plan.setting import CORRAL
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories
from supervisor.system.processor_load import BusyProgram

PLAIN: Final = "plain"
# Without these, a model for embeddings makes none.
_PURPOSE: Final = frozenset({"--embedding", "--embeddings", "--rerank", "--reranking", "--pooling"})
_ALWAYS: Final = frozenset({"--model", "--alias"})


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One way to run a model, with a unique name; `profile` None means the engine's defaults."""

    name: str
    profile: str | None
    plan: Plan

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line, without the listening address."""
        words = [(line.flag, line.value) for line in self.plan.lines]
        return (
            *self.plan.engine.command,
            *(word for pair in words for word in pair if word is not None),
        )


def of_profile(
    settings: Settings,
    directories: Directories,
    model: str,
    profile: str | None = None,
    flags: Mapping[str, FlagValue] | None = None,
) -> VariantSpec:
    """Plan one instance that has the machine for itself.

    Without `profile`, it is the model's own with the flags that `corral tune` found; with one, that
    profile alone, below the model's own flags. `flags` win over both.

    Raises:
        NoSuchModel, EngineMissing, EngineBroken, ModelInvalid, SettingsInvalid: It cannot run.
    """
    own = settings.models[model]
    changed = own.model_copy(
        update={
            "profile": profile or own.profile,
            "flags": {**own.flags, **(flags or {})},
            "replicas": 1,
            "trial": None,
        }
    )
    alone = settings.model_copy(update={"models": {model: changed}})
    planner = LaunchPlanner(
        alone, directories, read_tuned=None if profile is None else lambda _: None
    )
    return VariantSpec(changed.profile, changed.profile, planner.plan(model))


def plain_variant(plan: Plan) -> VariantSpec:
    """Return the engine's own defaults, as for a user who names only the model."""
    lines = tuple(line for line in plan.lines if line.flag in _ALWAYS | _PURPOSE)
    purpose = {
        key: value for key, value in plan.memory_inputs.chosen.items() if f"--{key}" in _PURPOSE
    }
    return VariantSpec(
        PLAIN,
        None,
        replace(
            plan,
            lines=tuple(
                line if line.flag in _ALWAYS else replace(line, origin=CORRAL) for line in lines
            ),
            omitted=(),
            warnings=(),
            untried_threads=None,
            memory_inputs=replace(plan.memory_inputs, chosen=purpose, draft=None),
        ),
    )


def choose(
    settings: Settings, directories: Directories, model: str, profiles: Sequence[str]
) -> tuple[VariantSpec, ...]:
    """Return the variants of a bench; the others are compared with the first.

    Without profiles: the engine's defaults (`plain`) and the model's own profile. A profile may be
    named twice, which shows the noise.
    """
    own = of_profile(settings, directories, model)
    if not profiles:
        return plain_variant(own.plan), own
    specs = (
        plain_variant(own.plan) if name == PLAIN else of_profile(settings, directories, model, name)
        for name in profiles
    )
    seen = Counter[str]()
    found = []
    for spec in specs:
        seen[spec.name] += 1
        count = seen[spec.name]
        found.append(replace(spec, name=f"{spec.name} ({count})") if count > 1 else spec)
    return tuple(found)


# Decoding threads wait for each other: a descheduled thread delays all. The background load of
# an idle machine stays below this.
_FREE_CORES: Final = 0.2
_FREE_SHARE: Final = 0.05
_NAMED_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that the user's daemon holds in memory."""

    name: str
    memory_bytes: int | None
    slots_busy: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The state of the machine before the first start."""

    capacity: MemoryCapacity  # the part of each memory that models may use
    available_bytes: int
    logical_cores: int
    programs: tuple[BusyProgram, ...]  # the busiest first
    loaded: tuple[LoadedModel, ...]  # the models of the user's daemon


def obstacles(facts: MachineFacts, specs: Sequence[VariantSpec]) -> tuple[str, ...]:
    """Return the disturbances of a measurement, as clauses; none if the machine is free."""
    return (*_memory(facts, specs), *_processor(facts))


def check(facts: MachineFacts, specs: Sequence[VariantSpec]) -> None:
    if found := obstacles(facts, specs):
        names = " ".join(model.name for model in facts.loaded)
        unload = f" (corral unload {names})" if names else ""
        raise MachineBusy(
            f"the machine is not free to measure on: {'; '.join(found)}",
            hint=f"end these programs{unload}, or measure anyway with --force",
        )


def notes(facts: MachineFacts) -> Iterator[str]:
    """Yield facts that a reader of the result should know although they are no obstacle."""
    if facts.loaded:
        yield f"the daemon kept {_loaded_text(facts.loaded)} in memory meanwhile"


def note_on_load(others_cores: Sequence[float], logical_cores: int) -> str | None:
    """Return a note on the load by other programs during measurements, or None if it was low."""
    disturbed = [cores for cores in others_cores if cores > _free_cores(logical_cores)]
    if not disturbed:
        return None
    return (
        f"other programs took up to {max(disturbed):.1f} cores, in {len(disturbed)} of "
        f"{len(others_cores)} measurements: repeat it on a free machine"
    )


def _free_cores(logical_cores: int) -> float:
    return max(_FREE_CORES, _FREE_SHARE * logical_cores)


def _memory(facts: MachineFacts, specs: Sequence[VariantSpec]) -> Iterator[str]:
    for spec in specs:
        estimate = spec.plan.estimate
        if reason := misfit_reason(estimate, facts.capacity):
            yield f"{spec.name} can never fit: {reason}"
        elif estimate.host.at_start > facts.available_bytes:
            needed, free = size(estimate.host.at_start), size(facts.available_bytes)
            holds = f" (the daemon holds {_loaded_text(facts.loaded)})" if facts.loaded else ""
            yield f"{spec.name} needs {needed} of main memory, but {free} are free{holds}"


def _processor(facts: MachineFacts) -> Iterator[str]:
    if sum(cores for _, _, cores in facts.programs) <= _free_cores(facts.logical_cores):
        return
    names = {pid: model.name for model in facts.loaded for pid in model.pids}
    for pid, name, cores in facts.programs[:_NAMED_MAX]:
        who = f"the daemon's {names[pid]}" if pid in names else f"{name} (pid {pid})"
        yield f"{who} takes {cores:.1f} cores"


def _loaded_text(loaded: Sequence[LoadedModel]) -> str:
    return ", ".join(
        f"{model.name} ({size(model.memory_bytes)}"
        + (f", {model.slots_busy} requests running)" if model.slots_busy else ")")
        for model in loaded
    )
