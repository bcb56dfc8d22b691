"""Settings of what the daemon adapts while it serves."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, model_validator

from proxy.config.types import SettingsTable

_SAMPLE_MAX_S: Final = 5.0
# Samples in the shorter of the two times, at least.
_SAMPLES: Final = 10
# Times queued_s; it bounds the samples that are kept.
_QUIET_MAX: Final = 500


class SlotSettings(SettingsTable):
    """`[models.NAME.slots]`: slots that follow demand, where `parallel` and `ctx-size` are auto."""

    follow_demand: bool = Field(
        default=True,
        description="more slots while requests queue and memory allows, each with as much context; "
        "fewer when it is quiet",
    )
    max: int = Field(16, ge=1, le=256, description="the most slots of one instance")
    queued_s: float = Field(
        60, gt=0, le=3600, description="how long requests queue before there are more slots"
    )
    quiet_s: float = Field(
        600,
        gt=0,
        le=86_400,
        description="how long at most half of the slots are in use before there are fewer",
    )

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if self.quiet_s > _QUIET_MAX * self.queued_s:
            raise ValueError(f"quiet_s is more than {_QUIET_MAX} times queued_s")
        return self

    @property
    def sample_s(self) -> float:
        """How often demand is sampled."""
        return min(_SAMPLE_MAX_S, self.queued_s / _SAMPLES, self.quiet_s / _SAMPLES)
