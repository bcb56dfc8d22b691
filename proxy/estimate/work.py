"""The work of a model's engines at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that has a slot.

    Attributes:
        slot: The engine's number of it; a guess where the engine chose.
        prompt_tokens: Still to compute.
        depth: Tokens before those, or before those of the answer.
        answer_tokens: Still to generate, as expected.
    """

    slot: int
    prompt_tokens: int
    depth: int
    answer_tokens: float


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that has no slot yet.

    Attributes:
        prompt_tokens: Of the whole prompt.
        uncached_tokens: Of these, what an instance has to compute that holds nothing of it.
        new_tokens: What one has to that does hold some, by its name.
        instance: The one whose slot alone it takes; None: any.
        slots: The slot that holds its conversation, by instance.
    """

    prompt_tokens: int
    answer_tokens: float
    uncached_tokens: int | None = None
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    instance: str | None = None
    slots: Mapping[str, int] = field(default_factory=dict)

    def new_on(self, instance: str) -> int:
        """Return the tokens that an instance has to compute."""
        uncached = self.prompt_tokens if self.uncached_tokens is None else self.uncached_tokens
        return self.new_tokens.get(instance, uncached)


@dataclass(frozen=True, slots=True)
class EngineWork:
    """An instance and its requests.

    Attributes:
        batch_tokens: The most tokens in one pass.
        free_slots: In the order in which the engine takes them.
        weight: Its speed as a multiple of an average instance's.
    """

    name: str
    batch_tokens: int
    running: tuple[RunningRequest, ...] = ()
    free_slots: tuple[int, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The engines of a model, and all requests that wait, in the order of their turns.

    Attributes:
        place: That of the estimated request among those that wait, from 0.
        ready_in_s: When the engines begin: later than now where the model has to be loaded.
    """

    engines: tuple[EngineWork, ...]
    waiting: tuple[WaitingRequest, ...]
    place: int
    ready_in_s: float = 0.0

    @property
    def others(self) -> int:
        """How many requests run, or wait with the estimated one."""
        return len(self.waiting) - 1 + sum(len(one.running) for one in self.engines)
