"""What deciders see of a model, and the changes that they want."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from supervisor.flags.plan import Plan
from supervisor.flags.setting import Setting
from supervisor.settings.schema import ModelSettings


@dataclass(frozen=True, slots=True)
class ModelView:
    """A loaded model at one moment; all its instances serve."""

    name: str
    at_s: float
    waiting: int  # requests that wait for a slot
    busy: int  # slots in use
    instances: Mapping[str, int]  # the process of each, by name
    plan: Plan  # of its first instance, which runs
    base: Plan  # what would run without adapted values
    settings: ModelSettings

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.busy)


@dataclass(frozen=True, slots=True)
class Change:
    """A wanted change of one value of a model."""

    key: str  # today's name of the option, one of AUTO_VALUES
    to: Setting | None  # None for what is planned without adapted values
    reason: str  # a clause
    # Whether a replacement while requests run is wanted, which complete on the old instance. Others
    # wait for a moment without requests.
    is_urgent: bool = False


class Decider(Protocol):
    """Decides about one or more values of all models; it keeps what it has seen, bounded."""

    def sample(self, models: Sequence[ModelView]) -> None:
        """Note the state of the loaded models, and of whatever else counts, every few seconds."""

    def changes(self, model: ModelView) -> Sequence[Change]:
        """Return the changes wanted now; a change is wanted again until it has been made."""
