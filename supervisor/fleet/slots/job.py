"""One saving or restoring of the slots of one run: all it has to know, and what it tells."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from supervisor.events import Emit
from supervisor.fleet.slots.check import Rejected
from supervisor.fleet.slots.manifest import Identity, Manifest
from supervisor.fleet.slots.shelf import Shelf
from supervisor.fleet.slots.worth import Budget
from supervisor.profile.plan import Plan


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose conversations they are.

    Attributes:
        instance: The instance's name.
        model: The model's name.
        replica: Its number, from 0.
        replicas: How many there are.
        chains: What the proxy calls the conversations that it holds.
    """

    instance: str
    model: str
    replica: int
    replicas: int
    chains: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """What a job came to, so far; `chains` are those of the files, as the proxy calls them."""

    began_at_s: float = field(default_factory=time.monotonic)
    slots: int = 0
    tokens: int = 0
    size_bytes: int = 0
    chains: tuple[str, ...] = ()

    def add(self, one: Manifest) -> None:
        """Count one slot."""
        self.slots += 1
        self.tokens += one.tokens
        self.size_bytes += one.size_bytes
        self.chains = tuple(dict.fromkeys((*self.chains, *one.chains)))


@dataclass(frozen=True, slots=True)
class Job:
    """One saving or restoring.

    Attributes:
        run: The run of the engine.
        owner: Whose slots they are.
        plan: What the run was made from.
        identity: What its caches belong to.
        shelf: Where files are kept.
        budget: How much is kept.
        emit: Where events go.
    """

    run: int
    owner: Owner
    plan: Plan
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
