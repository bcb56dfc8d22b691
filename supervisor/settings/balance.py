"""`[balance]`: when layers move between the workers of a split model."""

from __future__ import annotations

from pydantic import Field

from proxy.config.types import SettingsTable


class LoadBalanceConfig(SettingsTable):
    """What a decision to move layers takes."""

    min_samples: int = Field(
        100, ge=1, le=10**9, description="passes of each worker before anything is decided"
    )
    imbalance_threshold: float = Field(
        2.0,
        ge=1,
        le=1000,
        description="how many times longer the slowest worker takes per layer than the fastest "
        "one before layers are moved",
    )
    eval_interval_secs: int = Field(
        60, ge=0, le=86_400, description="shortest time between two automatic decisions, in seconds"
    )


class BalanceSettings(LoadBalanceConfig):
    """`[balance]`: layers of models that are split over workers."""

    automatic: bool = Field(
        default=False,
        description="move layers as `corral balance --apply` does; each time the model loads again",
    )
