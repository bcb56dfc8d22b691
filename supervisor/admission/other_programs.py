"""Memory of devices that other programs take. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisor.admission.evict import Bytes


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    """Bytes by device.

    Attributes:
        taken: What they take.
        returning: What engines of ours that have ended are yet to give back, or else they take too.
    """

    taken: Bytes = field(default_factory=dict)
    returning: Bytes = field(default_factory=dict)


def observe(
    before: OtherPrograms, total: Bytes, free: Bytes, held: Bytes, *, may_grow: bool
) -> OtherPrograms:
    """Return what follows from the free memory of devices of which models hold `held`.

    While it may grow, because an engine has just ended, what is missing is taken to come back.
    """
    missing = {
        name: max(0, total[name] - size - held.get(name, 0))
        for name, size in free.items()
        if name in total
    }
    if not may_grow:
        return OtherPrograms(missing)
    taken = {name: min(size, before.taken.get(name, 0)) for name, size in missing.items()}
    return OtherPrograms(taken, {name: size - taken[name] for name, size in missing.items()})
