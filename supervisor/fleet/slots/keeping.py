"""How conversations are kept, as the settings and the machine have it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from supervisor.errors import StateDenied
from supervisor.events import Emit
from supervisor.fleet.slots.manifest import identify
from supervisor.fleet.slots.reason import reason_against
from supervisor.fleet.slots.shelf import Shelf
from supervisor.fleet.slots.worth import Budget
from supervisor.host.paths import Directories
from supervisor.profile.plan import Plan
from supervisor.settings.tables import SupervisorTable

_DISPROVED: Final = (
    "this engine did not use what it was given back; other settings have it tried again, "
    "or corral slots forget {model}"
)


@dataclass(frozen=True, slots=True)
class Keeping:
    """How conversations are kept.

    Attributes:
        shelf: Where.
        is_on: Whether they are; what was kept before can be forgotten all the same.
        budget: How much.
        timeout_s: How long one save of all slots of an instance may take.
    """

    shelf: Shelf
    is_on: bool
    budget: Budget
    timeout_s: float

    def reason_against(self, plan: Plan) -> str | None:
        """Return why nothing is kept for a plan, as a clause; None where it is."""
        return reason_against(plan) if self.is_on else "keep_slots is false"

    def reason(self, plan: Plan) -> str | None:
        """Return why nothing is kept of a plan's conversations, as a clause; None where they are.

        Other than `reason_against`, it knows what was found out by trying.
        """
        if identify(plan) in self.shelf.disproved:
            return _DISPROVED.format(model=plan.model)
        return self.reason_against(plan)

    def words(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Return what tells an engine where to write, none where it shall not."""
        if self.reason_against(plan):
            return ()
        return ("--slot-save-path", str(self.shelf.spool_path(instance)))

    def make_room(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Return `words`, having made the directory; none where that cannot be made.

        An engine refuses to start without it, and to keep conversations is no reason not to start.
        """
        if words := self.words(plan, instance):
            try:
                self.shelf.spool(instance)
            except StateDenied:
                return ()
        return words


def sweep(keeping: Keeping, emit: Emit) -> None:
    """Put the shelf in order, as only the daemon that owns it may, before it runs an engine.

    A disk that refuses is no reason not to serve; it is met again by whoever saves.
    """
    with suppress(OSError, StateDenied):
        for one in keeping.shelf.sweep(keeping.budget):
            emit("slots.quarantined", model=one.model, file=one.name, why=one.why)


def keeping(directories: Directories, table: SupervisorTable) -> Keeping:
    """Return how conversations are kept by the settings."""
    return Keeping(
        shelf=shelf_in(directories),
        is_on=table.keep_slots,
        budget=Budget(table.slots_budget),
        timeout_s=table.save_timeout_s,
    )


def shelf_in(directories: Directories) -> Shelf:
    """Return where conversations are kept."""
    return Shelf(directories.data / "slots")
