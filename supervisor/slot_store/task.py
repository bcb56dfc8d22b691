"""The data that saving and restoring the slots of one run share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.upstream.slots import SlotState
from supervisor.events import Emit
from supervisor.flags.plan import Plan
from supervisor.slot_store.catalogue import key_digest
from supervisor.slot_store.manifest import CacheKey, Manifest
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.quarantine import QuarantinedFile
from supervisor.slot_store.slot_files import SlotFiles
from supervisor.slot_store.store import SlotStore

# Returns the proxy's fingerprints of the conversations in idle slots.
Fingerprints = Callable[[Sequence[SlotState]], Mapping[int, ConversationFingerprint]]


@dataclass(frozen=True, slots=True)
class ReplicaRef:
    """The replica whose slots they are."""

    instance: str
    model: str
    replica: int  # from 0
    replicas: int  # of the model


@dataclass(slots=True)
class SlotTransfer:
    """What was saved or restored so far."""

    began_at_s: float = field(default_factory=time.monotonic)
    slots: int = 0
    tokens: int = 0
    size_bytes: int = 0

    def add(self, manifest: Manifest) -> None:
        self.slots += 1
        self.tokens += manifest.tokens
        self.size_bytes += manifest.size_bytes


@dataclass(frozen=True, slots=True)
class SlotTask:
    """One saving or restoring."""

    run: int
    owner: ReplicaRef
    plan: Plan
    fingerprints: Fingerprints
    is_elsewhere: Callable[[ConversationFingerprint], bool]
    key: CacheKey
    files: SlotFiles
    store: SlotStore
    budget: DiskBudget
    emit: Emit  # adds the instance and the model
    emit_any: Emit

    @property
    def key_digest(self) -> str:
        return key_digest(self.owner.model, self.key)

    @property
    def ctx_slot(self) -> int:
        """The context size of a slot; 0 where the engine decides."""
        return self.plan.ctx_size // max(1, self.plan.slots)

    def spool(self) -> Path:
        """Return the directory in which the engine writes and reads, made if missing.

        Raises:
            AccessDenied: It cannot be made.
        """
        return self.store.spool(self.owner.instance)

    def emit_transfer(self, event: str, transfer: SlotTransfer) -> None:
        if transfer.slots:
            self.emit(
                event,
                run=self.run,
                slots=transfer.slots,
                tokens=transfer.tokens,
                size_bytes=transfer.size_bytes,
                duration_ms=round(1000 * (time.monotonic() - transfer.began_at_s), 1),
            )

    def emit_failed(self, reason: str) -> None:
        self.emit("slots.save_failed", run=self.run, reason=reason)

    def emit_restore_failed(self, error: Exception) -> None:
        self.emit("slots.restore_failed", run=self.run, reason=str(error))

    def pause_saving(self, reason: str) -> None:
        """Save nothing for a while, except when an instance stops; report it once."""
        if pause_s := self.files.limits.pause.begin():
            self.emit_failed(f"{reason}; more is saved in {pause_s:.0f} s")

    def emit_quarantined(self, file: QuarantinedFile) -> None:
        self.emit_any("slots.quarantined", model=file.model, file=file.name, reason=file.reason)
