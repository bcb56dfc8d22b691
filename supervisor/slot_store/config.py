"""How conversations are kept, as the settings and the machine have it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from supervisor.errors import AccessDenied
from supervisor.events import Emit
from supervisor.flags.plan import Plan
from supervisor.host.paths import Directories
from supervisor.settings.schema import SupervisorSettings
from supervisor.slot_store.manifest import cache_key
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.store import SlotStore
from supervisor.slot_store.support import unsupported_reason

_DISPROVED: Final = (
    "this engine did not use what it was given back; other settings have it tried again, "
    "or corral slots forget {model}"
)


@dataclass(frozen=True, slots=True)
class SlotPersistence:
    """How conversations are kept.

    Attributes:
        store: Where.
        is_on: Whether they are; what was kept before can be forgotten all the same.
        budget: How much.
        timeout_s: How long one save of all slots of an instance may take.
    """

    store: SlotStore
    is_on: bool
    budget: DiskBudget
    timeout_s: float

    def reason_against(self, plan: Plan) -> str | None:
        """Return why nothing is kept for a plan, as a clause; None where it is."""
        return unsupported_reason(plan) if self.is_on else "persist_slots is false"

    def reason(self, plan: Plan) -> str | None:
        """Return why nothing is kept of a plan's conversations, as a clause; None where they are.

        Other than `unsupported_reason`, it knows what was found out by trying.
        """
        if cache_key(plan) in self.store.disproved:
            return _DISPROVED.format(model=plan.model)
        return self.reason_against(plan)

    def arguments(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Return what tells an engine where to write, none where it shall not."""
        if self.reason_against(plan):
            return ()
        return ("--slot-save-path", str(self.store.spool_path(instance)))

    def make_room(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Return `words`, having made the directory; none where that cannot be made.

        An engine refuses to start without it, and to keep conversations is no reason not to start.
        """
        if words := self.arguments(plan, instance):
            try:
                self.store.spool(instance)
            except AccessDenied:
                return ()
        return words


def clean_up(keeping: SlotPersistence, emit: Emit) -> None:
    """Clean up the slot store, as only the daemon that owns it may, before it runs an engine.

    A disk that refuses is no reason not to serve; it is met again by whoever saves.
    """
    with suppress(OSError, AccessDenied):
        for one in keeping.store.clean_up(keeping.budget):
            emit("slots.quarantined", model=one.model, file=one.name, reason=one.reason)


def slot_persistence(directories: Directories, table: SupervisorSettings) -> SlotPersistence:
    """Return how conversations are kept by the settings."""
    return SlotPersistence(
        store=store_in(directories),
        is_on=table.persist_slots,
        budget=DiskBudget(table.slots_disk_budget),
        timeout_s=table.slot_save_timeout_s,
    )


def store_in(directories: Directories) -> SlotStore:
    """Return where conversations are kept."""
    return SlotStore(directories.data / "slots")
