"""One saving or restoring of the slots of one run: all it has to know, and what it tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from proxy.upstream.slots import SlotState
from supervisor.errors import AccessDenied
from supervisor.events import Emit
from supervisor.flags.plan import Plan
from supervisor.slot_store.file_check import QuarantinedFile
from supervisor.slot_store.manifest import CacheKey, Manifest
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.store import SlotStore

# What the proxy calls the conversations in an instance's idle slots, as these are told of now.
Fingerprints = Callable[[Sequence[SlotState]], Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class ReplicaRef:
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
class SlotTransfer:
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
class SlotTask:
    """One saving or restoring.

    Attributes:
        run: The run of the engine.
        owner: Whose slots they are.
        plan: What the run was made from.
        fingerprints: Tells what its slots hold.
        identity: What its caches belong to.
        store: Where files are kept.
        budget: How much is kept.
        emit: Where events go.
    """

    run: int
    owner: ReplicaRef
    plan: Plan
    fingerprints: Fingerprints
    identity: CacheKey
    store: SlotStore
    budget: DiskBudget
    emit: Emit

    def spool(self) -> Path:
        """Return the directory in which the engine writes and reads.

        Raises:
            AccessDenied: It cannot be made.
        """
        return self.store.spool(self.owner.instance)

    def saved(self, tally: SlotTransfer) -> None:
        """Tell what was saved, if anything was."""
        if tally.slots:
            self.emit("slots.saved", **self._figures(tally))

    def restored(self, tally: SlotTransfer) -> None:
        """Tell what was restored, if anything was."""
        if tally.slots:
            self.emit("slots.restored", **self._figures(tally))

    def _figures(self, tally: SlotTransfer) -> dict[str, object]:
        return {
            "instance": self.owner.instance,
            "model": self.owner.model,
            "run": self.run,
            "slots": tally.slots,
            "tokens": tally.tokens,
            "size_bytes": tally.size_bytes,
            "duration_ms": round(1000 * (time.monotonic() - tally.began_at_s), 1),
        }

    def restore_unused(self, expected: int, cached: int) -> None:
        """Tell, and remember if that can be, that the engine does not use what it is given back.

        Args:
            expected: Tokens that it should have had.
            cached: Tokens that it had.
        """
        self.emit(
            "slots.restore_unused",
            instance=self.owner.instance,
            model=self.owner.model,
            expected=expected,
            cached=cached,
        )
        with suppress(OSError, AccessDenied):  # else it is found out once more
            self.store.disproved.add(self.owner.model, self.identity)

    def save_failed(self, reason: str) -> None:
        """Tell that something is not saved."""
        self.emit(
            "slots.save_failed",
            instance=self.owner.instance,
            model=self.owner.model,
            run=self.run,
            reason=reason,
        )

    def quarantined(self, one: QuarantinedFile) -> None:
        """Tell that a file was moved aside."""
        self.emit("slots.quarantined", model=one.model, file=one.name, reason=one.reason)
