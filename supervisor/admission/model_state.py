"""A model as far as its coming into memory and leaving it is decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisor.admission.evict import Bytes
from supervisor.fleet.availability import Phase
from supervisor.settings.schema import ResidencyPolicy


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for a model's memory.

    Attributes:
        place: Its turn among the models that wait, 1 for the first.
        requests: How many; none where only a command does.
        wait_s: How long the first has waited.
        leaving: Models that get nothing new, so that they can leave for it.
    """

    place: int
    requests: int
    wait_s: float
    leaving: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model, as far as its coming and going is decided.

    Attributes:
        name: The model.
        phase: Where it is.
        stay: What the settings say.
        required: Of each memory, what it takes, or would take if it came.
        is_wished: Whether a command asks for it.
        is_held: Whether it is given nothing new, so that it can leave.
        waiting: Requests that wait for it.
        oldest_wait_s: How long the first of them, or the command, has waited.
        working: Requests that it answers.
        idle_s: Seconds since it last had one; 0 while it has.
        resident_s: Seconds it has been up.
        progress: How far its start has come, 0 to 1.
        reload_cost_s: Seconds that a start takes.
        cached_tokens: Tokens that would have to be read anew if it left.
    """

    name: str
    phase: Phase
    stay: ResidencyPolicy = ResidencyPolicy()  # noqa: RUF009 (frozen)
    required: Bytes = field(default_factory=dict)
    is_wished: bool = False
    is_held: bool = False
    waiting: int = 0
    oldest_wait_s: float = 0.0
    working: int = 0
    idle_s: float = 0.0
    resident_s: float = 0.0
    progress: float = 0.0
    reload_cost_s: float = 0.0
    cached_tokens: int = 0

    @property
    def is_busy(self) -> bool:
        """Return whether somebody has or awaits an answer of it."""
        return bool(self.waiting or self.working)
