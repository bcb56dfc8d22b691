"""What the supervisor expects of the load of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from proxy.upstream.upstream import BATCH_TOKENS


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """The load of a model that no instance serves.

    Attributes:
        in_s: Seconds until it serves; None where it was never loaded, or that cannot be told now.
        evicts: The models that would be unloaded for it.
        instances: How many begin.
        slots: Of each.
        batch_tokens: The most tokens in one pass of each.
        refusal: Why it would not be loaded; None: it would.
    """

    in_s: float | None
    evicts: tuple[str, ...] = ()
    instances: int = 1
    slots: int = 1
    batch_tokens: int = BATCH_TOKENS
    refusal: str | None = None


class LoadForecaster(Protocol):
    def load_forecast(self, model: str, /) -> LoadForecast | None:
        """Return what a request would cause; None: the model is not of this machine.

        Loads nothing, and takes milliseconds at most.
        """
