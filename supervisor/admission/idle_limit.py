"""How long a model may be idle before it is unloaded: `ttl_s`, or a `keep_alive`. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from supervisor.settings.schema import ResidencyPolicy


@dataclass(frozen=True, slots=True)
class IdleLimit:
    """A limit in force.

    Attributes:
        seconds: Infinite for none.
        is_from_request: Whether a request gave it.
    """

    seconds: float
    is_from_request: bool = False

    @property
    def reason(self) -> str:
        """Why a model was unloaded that was idle as long."""
        if self.is_from_request:
            return f"the keep_alive of its latest request was {self.seconds:g} s"
        return "no request came within ttl_s"


def idle_limit(residency: ResidencyPolicy, keep_alive_s: float | None) -> IdleLimit:
    """Return the limit of a model whose requests gave `keep_alive_s` last, if they gave any."""
    if residency.pinned:
        return IdleLimit(math.inf)
    if keep_alive_s is None or not residency.keep_alive:
        return IdleLimit(residency.ttl_s or math.inf)
    most_s = math.inf if residency.keep_alive_max_s is None else residency.keep_alive_max_s
    return IdleLimit(min(keep_alive_s, most_s), is_from_request=True)
