"""When models enter and leave memory: phases, and what the settings say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Phase(Enum):
    """Where a model is on its way in and out of memory."""

    DOWN = auto()
    LOADING = auto()
    LOADED = auto()
    UNLOADING = auto()
    FAILED = auto()
    """Down, and a start would not help: somebody must act."""


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """What the settings say of a model's coming and going.

    Attributes:
        preload: Whether it comes up with the daemon.
        is_pinned: Whether it never leaves for another, nor for want of requests.
        ttl_s: Seconds without a request after which it leaves; 0 for never.
        min_residency_s: Seconds it stays at least before it leaves for another.
    """

    preload: bool = True
    is_pinned: bool = False
    ttl_s: float = 0.0
    min_residency_s: float = 2.0


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """What the settings say of all models' coming and going.

    Attributes:
        eviction_wait_s: Seconds that a claim waits for others to fall idle of themselves.
        abandon_load_below: A start that nobody waits for may be given up while less of it is done.
    """

    eviction_wait_s: float = 20.0
    abandon_load_below: float = 0.5
