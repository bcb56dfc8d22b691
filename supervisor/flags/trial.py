"""`[models.NAME.trial]`: one more replica of a model with another profile or engine. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from proxy.config.types import SettingsTable, Text
from supervisor.engines.engine_setting import EngineField
from supervisor.flags.auto import cache_count, ctx_slot
from supervisor.flags.plan import ModelEntry, Plan
from supervisor.flags.setting import FlagName, FlagSetting


class TrialSettings(SettingsTable):
    """`[models.NAME.trial]`: one more replica runs with these, for a share of conversations."""

    profile: Text | None = Field(
        None, description="the profile on trial; unset: the model's own, with other flags"
    )
    engine: EngineField | None = Field(
        None, description="the engine on trial; unset: the model's own"
    )
    share: float = Field(
        gt=0, lt=1, description="share of new conversations that it gets, between 0 and 1"
    )
    flags: dict[FlagName, FlagSetting] = Field(
        default_factory=dict, description="flags on trial; they win over the model's own"
    )

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if self.profile is None and self.engine is None and not self.flags:
            raise ValueError("give a profile, flags or an engine to try")
        return self

    def label(self, own_profile: str) -> str:
        """Return the profile, flags and engine on trial, for people."""
        flags = ", ".join(f"{key} = {value}" for key, value in self.flags.items())
        with_flags = " with ".join(filter(None, (self.profile or own_profile, flags)))
        return f"{with_flags} on {self.engine}" if self.engine else with_flags

    def applied(self, entry: ModelEntry) -> ModelEntry:
        """Return a model as its trial runs it."""
        return replace(
            entry,
            profile=self.profile or entry.profile,
            flags={**entry.flags, **self.flags},
            engine=self.engine or entry.engine,
        )


class CanaryTrial(TrialSettings):
    """The trial of a canary: of an engine alone, and not in `corral.toml`."""


def with_context_of(plan: Plan, trial: Plan, entry: ModelEntry) -> ModelEntry | None:
    """Return what to plan a trial with for slots as long as the model's; None if they are.

    A conversation that the model can hold must not be refused because it is part of a trial.
    """
    wanted, given = (ctx_slot(one.memory_inputs.chosen) for one in (plan, trial))
    if given == 0 or 0 < wanted <= given:
        return None
    ctx_size = wanted * cache_count(trial.memory_inputs.chosen)
    return replace(entry, flags={**entry.flags, "ctx-size": ctx_size})
