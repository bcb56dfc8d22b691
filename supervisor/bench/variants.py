"""The variants of a bench: one model under several profiles, or with the engine's own defaults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from supervisor.engines.help import FlagValue
from supervisor.flags.plan import Plan
from supervisor.flags.setting import CORRAL
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.paths import Directories
from supervisor.settings.schema import Settings

PLAIN: Final = "plain"
# Without these, a model that makes embeddings does not.
_PURPOSE: Final = frozenset({"--embedding", "--embeddings", "--rerank", "--reranking", "--pooling"})
_ALWAYS: Final = frozenset({"--model", "--alias"})


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One way to run a model.

    Attributes:
        name: Unique among the variants.
        profile: None for the engine's own defaults.
    """

    name: str
    profile: str | None
    plan: Plan

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line, without the address it listens on."""
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
    """One instance that has the machine for itself.

    Without a profile it is the model's own, with what `corral tune` found; with one, that profile
    as it is, below the model's own flags. `flags` win over both.

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


def plain(plan: Plan) -> VariantSpec:
    """The engine's own defaults, as someone runs it who only names the model."""
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
    """The variants of a bench, the first of which the others are compared with.

    Without profiles: the engine's defaults and the model's own profile. `plain` among the profiles
    means the engine's defaults. A profile may stand there twice, to see the noise.
    """
    own = of_profile(settings, directories, model)
    if not profiles:
        return plain(own.plan), own
    return _unique(
        plain(own.plan) if name == PLAIN else of_profile(settings, directories, model, name)
        for name in profiles
    )


def _unique(specs: Iterable[VariantSpec]) -> tuple[VariantSpec, ...]:
    seen = Counter[str]()
    found = []
    for spec in specs:
        seen[spec.name] += 1
        count = seen[spec.name]
        found.append(replace(spec, name=f"{spec.name} ({count})") if count > 1 else spec)
    return tuple(found)
