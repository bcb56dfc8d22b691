"""The settings of the slot store, resolved for this machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.events import Emit
from supervisor.plan.plan import Plan
from supervisor.settings.schema import SupervisorSettings
from supervisor.slot_store.encryption import PLAIN, SlotContent, SlotKey, read_key_ring
from supervisor.slot_store.manifest import cache_key
from supervisor.slot_store.policy import DiskBudget, auto_budget_bytes, unsupported_reason
from supervisor.slot_store.shared_directory import SharedDirectory
from supervisor.slot_store.store import RestoreOutcome, SlotStore
from supervisor.system.files import memory_directory
from supervisor.system.paths import Directories

SLOT_DIRECTORY: Final = "--slot-save-path"
_NO_MEMORY: Final = (
    "slots_key_file is set, and this machine has no file system in memory for the files of engines"
)
_TRY_AGAIN: Final = "{problem}; another build or corral slots forget {model} tries it again"


@dataclass(frozen=True, slots=True)
class SlotPersistence:
    store: SlotStore
    is_on: bool
    limits: DiskBudget
    timeout_s: float  # for saving all slots of an instance
    problem: str = ""  # why files cannot be encrypted although they should be
    memory_spool: Path | None = None  # the spool in memory, if files are encrypted

    @property
    def encrypts(self) -> bool:
        return bool(self.store.content.keys)

    def reason(self, plan: Plan) -> str | None:
        """Return why no slot of a plan is saved, as a clause; None if they are."""
        if reason := self._unsupported_reason(plan) or self.problem:
            return reason
        outcome = self.outcome(plan)
        if outcome and outcome.problem:
            return _TRY_AGAIN.format(problem=outcome.problem, model=plan.model)
        return None

    def outcome(self, plan: Plan) -> RestoreOutcome | None:
        return self.store.outcomes.get(cache_key(plan))

    def budget(self, used_bytes: int | None = None, free_bytes: int | None = None) -> DiskBudget:
        """Return the limits with the size of now.

        `used_bytes` is the size of all slot files, `free_bytes` the free disk space, if known.
        """
        if not self.limits.is_auto:
            return self.limits
        if used_bytes is None:
            used_bytes = sum(manifest.size_bytes for manifest in self.store.list_saved())
        if free_bytes is None:
            root = self.store.root
            there = next(path for path in (root, *root.parents) if path.exists())
            free_bytes = shutil.disk_usage(there).free
        return replace(self.limits, size_bytes=auto_budget_bytes(free_bytes, used_bytes))

    def _unsupported_reason(self, plan: Plan) -> str | None:
        return unsupported_reason(plan) if self.is_on else "persist_slots is false"

    def arguments(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Return the engine's arguments; none if nothing is saved."""
        has_no_spool = self.problem and not self.memory_spool
        if has_no_spool or self._unsupported_reason(plan):
            return ()
        return (SLOT_DIRECTORY, str(self.store.spool_path(instance)))

    def prepare(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Make the spool directory and return `arguments`; if that fails, saving is off."""
        if arguments := self.arguments(plan, instance):
            try:
                self.store.spool(instance)
            except AccessDenied:
                return ()
        return arguments


def clean_up(persistence: SlotPersistence, emit: Emit) -> None:
    """Clean up the slot store. Only the daemon that owns it may call this, before engines start."""
    if persistence.problem:
        emit("slots.key_unusable", reason=persistence.problem)
    with suppress(OSError, AccessDenied):  # saving reports them
        persistence.store.clean_up()


def slot_persistence(directories: Directories, settings: SupervisorSettings) -> SlotPersistence:
    """Resolve the settings; unusable encryption keys are a `problem`, not an error."""
    path = settings.slots_key_file if settings.persist_slots else None
    spool = memory_directory(directories.runtime, "slots") if path else None
    keys: Mapping[str, SlotKey] = {}
    problem = ""
    if path and not spool:
        problem = _NO_MEMORY
    elif path:
        try:
            keys = read_key_ring(path)
        except SettingsInvalid as error:
            problem = error.message
    return SlotPersistence(
        store=store_in(directories, settings, SlotContent(keys), spool),
        is_on=settings.persist_slots,
        limits=DiskBudget(
            0 if settings.slots_disk_budget == "auto" else settings.slots_disk_budget,
            is_auto=settings.slots_disk_budget == "auto",
            max_age=timedelta(days=settings.slots_max_age_days),
            write_hour_bytes=settings.slots_write_budget,
        ),
        timeout_s=settings.slot_save_timeout_s,
        problem=problem,
        memory_spool=spool,
    )


def store_in(
    directories: Directories,
    settings: SupervisorSettings,
    content: SlotContent = PLAIN,
    spool: Path | None = None,
) -> SlotStore:
    own, shared = directories.data / "slots", None
    if root := settings.slots_directory:
        shared = SharedDirectory(root, own)
    return SlotStore(own, content, spool, shared)
