"""Time limits of an instance's states."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from supervisor.instance.health import HealthSettings


class InstanceLimits(HealthSettings):
    """How long each state of an instance may last, in seconds."""

    load_timeout_s: float = Field(
        300,
        gt=0,
        le=86_400,
        description="longest silence while loading",
    )
    warm_timeout_s: float = Field(30, gt=0, le=3600, description="time for the warm-up request")
    unhealthy_timeout_s: float = Field(
        60,
        gt=0,
        le=3600,
        description="time to recover before a restart; less while requests wait for it",
    )
    drain_timeout_s: float = Field(
        300,
        ge=0,
        le=86_400,
        description="time for running requests to finish before they are aborted",
    )
    stop_timeout_s: float = Field(5, gt=0, le=600, description="time to exit before SIGKILL")
    # From SIGKILL until it is sent once more.
    kill_timeout_s: ClassVar[float] = 5.0
