"""A canary: what was asked for, and what is decided of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from supervisor.engines.installed import EngineSetting
from supervisor.flags.trial import CanaryTrial

Outcome = Literal["promoted", "withdrawn"]


@dataclass(frozen=True, slots=True)
class CanaryRequest:
    """A canary to start.

    Attributes:
        share: Of new conversations, above 0 and below 1.
        limit_s: After which it is promoted or withdrawn; None: by command only.
        margin: How much slower it may be, as a share: 0.1 for a tenth.
    """

    model: str
    engine: EngineSetting
    share: float
    limit_s: float | None
    margin: float

    @property
    def trial(self) -> CanaryTrial:
        return CanaryTrial(engine=self.engine, share=self.share)


@dataclass(frozen=True, slots=True)
class EndedCanary:
    """`at` is ISO 8601 in UTC."""

    model: str
    engine: str
    outcome: Outcome
    reason: str
    at: str


@dataclass(slots=True)
class Canary:
    """A canary that runs.

    Attributes:
        decides_at_s: Monotonic; None: by command only.
        obstacle: Why it was not promoted although it may be; it then waits for a command.
    """

    request: CanaryRequest
    decides_at_s: float | None
    obstacle: str | None = None
