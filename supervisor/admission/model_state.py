"""A model as far as loading and unloading it is decided."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from supervisor.admission.evict import Bytes
from supervisor.admission.idle_limit import IdleLimit, idle_limit
from supervisor.fleet.availability import Phase
from supervisor.settings.schema import ResidencyPolicy


@dataclass(frozen=True, slots=True)
class Waiting:
    """The wait for a model that is not loaded.

    Attributes:
        place: Its position among the models that wait, from 1.
        requests: How many wait; 0 where only a command does.
        leaving: Models that are paused to be unloaded for it.
    """

    place: int
    requests: int
    wait_s: float
    leaving: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnloadTime:
    """When a loaded model is unloaded without requests.

    Attributes:
        in_s: From now; infinite while it is busy, or where it has no limit.
        limit: How long it may be idle.
    """

    in_s: float
    limit: IdleLimit


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model at one moment.

    Attributes:
        required: Bytes of each memory that it takes, or would take when loaded.
        is_commanded: Whether a command requests it.
        is_for_others: Whether another machine wants it loaded here.
        waiting: Requests that wait for it; `oldest_wait_s` includes the wait of a command.
        working: Requests that it is answering.
        idle_s: Seconds since the last of them ended; 0 while there are any.
        progress: Share of its load that is done, 0 to 1.
        keep_alive_s: What its requests gave last, if they gave any since it was loaded.
        cached_tokens: Tokens that would be computed again if it were unloaded.
    """

    name: str
    phase: Phase
    residency: ResidencyPolicy = ResidencyPolicy()  # noqa: RUF009 (frozen)
    required: Bytes = field(default_factory=dict)
    is_commanded: bool = False
    is_for_others: bool = False
    is_paused: bool = False
    waiting: int = 0
    oldest_wait_s: float = 0.0
    working: int = 0
    idle_s: float = 0.0
    resident_s: float = 0.0
    progress: float = 0.0
    reload_cost_s: float = 0.0
    cached_tokens: int = 0
    keep_alive_s: float | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.working)

    @property
    def is_only_for_others(self) -> bool:
        return self.is_for_others and not (self.is_commanded or self.waiting)

    @property
    def idle_limit(self) -> IdleLimit:
        return idle_limit(self.residency, self.keep_alive_s)

    @property
    def unload_in_s(self) -> float:
        """Seconds until it is unloaded unless a request comes; infinite where it is not."""
        if self.phase is not Phase.LOADED or self.is_busy:
            return math.inf
        return self.idle_limit.seconds - self.idle_s
