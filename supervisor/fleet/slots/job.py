"""One saving or restoring of the slots of one run: all it has to know, and what it tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from supervisor.errors import StateDenied
from supervisor.events import Emit
from supervisor.fleet.slots.check import Rejected
from supervisor.fleet.slots.manifest import Identity, Manifest
from supervisor.fleet.slots.shelf import Shelf
from supervisor.fleet.slots.worth import Budget
from supervisor.life.slots import Slot
from supervisor.profile.plan import Plan

# What the proxy calls the conversations in an instance's idle slots, as these are told of now.
Chains = Callable[[Sequence[Slot]], Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose conversations they are.

    Attributes:
        instance: The instance's name.
        model: The model's name.
        replica: Its number, from 0.
        replicas: How many there are.
    """

    instance: str
    model: str
    replica: int
    replicas: int


@dataclass(slots=True)
class Tally:
    """What a job came to, so far."""

    began_at_s: float = field(default_factory=time.monotonic)
    slots: int = 0
    tokens: int = 0
    size_bytes: int = 0

    def add(self, one: Manifest) -> None:
        """Count one slot."""
        self.slots += 1
        self.tokens += one.tokens
        self.size_bytes += one.size_bytes


@dataclass(frozen=True, slots=True)
class Job:
    """One saving or restoring.

    Attributes:
        run: The run of the engine.
        owner: Whose slots they are.
        plan: What the run was made from.
        chains: Tells what its slots hold.
        identity: What its caches belong to.
        shelf: Where files are kept.
        budget: How much is kept.
        emit: Where events go.
    """

    run: int
    owner: Owner
    plan: Plan
    chains: Chains
    identity: Identity
    shelf: Shelf
    budget: Budget
    emit: Emit

    def spool(self) -> Path:
        """Return the directory in which the engine writes and reads.

        Raises:
            StateDenied: It cannot be made.
        """
        return self.shelf.spool(self.owner.instance)

    def saved(self, tally: Tally) -> None:
        """Tell what was saved, if anything was."""
        if tally.slots:
            self.emit("slots.saved", **self._figures(tally))

    def restored(self, tally: Tally) -> None:
        """Tell what was restored, if anything was."""
        if tally.slots:
            self.emit("slots.restored", **self._figures(tally))

    def _figures(self, tally: Tally) -> dict[str, object]:
        return {
            "instance": self.owner.instance,
            "model": self.owner.model,
            "run": self.run,
            "slots": tally.slots,
            "tokens": tally.tokens,
            "size_bytes": tally.size_bytes,
            "took_ms": round(1000 * (time.monotonic() - tally.began_at_s), 1),
        }

    def disproved(self, expected: int, cached: int) -> None:
        """Tell, and remember if that can be, that the engine does not use what it is given back.

        Args:
            expected: Tokens that it should have had.
            cached: Tokens that it had.
        """
        self.emit(
            "slots.disproved",
            instance=self.owner.instance,
            model=self.owner.model,
            expected=expected,
            cached=cached,
        )
        with suppress(OSError, StateDenied):  # else it is found out once more
            self.shelf.disproved.add(self.owner.model, self.identity)

    def unsaved(self, why: str) -> None:
        """Tell that something is not saved."""
        self.emit(
            "slots.unsaved",
            instance=self.owner.instance,
            model=self.owner.model,
            run=self.run,
            why=why,
        )

    def rejected(self, one: Rejected) -> None:
        """Tell that a file was moved aside."""
        self.emit("slots.quarantined", model=one.model, file=one.name, why=one.why)
