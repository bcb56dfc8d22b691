"""`[models.NAME.trial]`: another profile for one more replica of a model. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from proxy.config.types import SettingsTable, Text
from supervisor.flags.auto import cache_count, ctx_slot
from supervisor.flags.plan import ModelEntry, Plan
from supervisor.flags.setting import FlagName, FlagSetting


class TrialSettings(SettingsTable):
    """`[models.NAME.trial]`: one more replica runs with these, for a share of conversations."""

    profile: Text | None = Field(
        None, description="the profile on trial; unset: the model's own, with other flags"
    )
    share: float = Field(
        gt=0, lt=1, description="share of new conversations that it gets, between 0 and 1"
    )
    flags: dict[FlagName, FlagSetting] = Field(
        default_factory=dict, description="flags on trial; they win over the model's own"
    )

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if self.profile is None and not self.flags:
            raise ValueError("give a profile or flags to try")
        return self

    def label(self, own_profile: str) -> str:
        """Return the profile and flags on trial, for people."""
        flags = ", ".join(f"{key} = {value}" for key, value in self.flags.items())
        return " with ".join(filter(None, (self.profile or own_profile, flags)))

    def applied(self, entry: ModelEntry) -> ModelEntry:
        """Return a model as its trial runs it."""
        flags = {**entry.flags, **self.flags}
        return replace(entry, profile=self.profile or entry.profile, flags=flags)


def with_context_of(plan: Plan, trial: Plan, entry: ModelEntry) -> ModelEntry | None:
    """Return what to plan a trial with for slots as long as the model's; None if they are.

    A conversation that the model can hold must not be refused because it is part of a trial.
    """
    wanted, given = (ctx_slot(one.memory_inputs.chosen) for one in (plan, trial))
    if given == 0 or 0 < wanted <= given:
        return None
    ctx_size = wanted * cache_count(trial.memory_inputs.chosen)
    return replace(entry, flags={**entry.flags, "ctx-size": ctx_size})
