"""Shares the processor time of an engine among the requests that hold its slots. Pure.

The time between two readings is shared among those that held slots between them, each by its
slots and by how long it held them. Time in which none did is the engine's own: loading, warming.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Holder:
    slots: int
    since_s: float
    cpu_s: float = 0.0


class CpuShares:
    """One process, from its start.

    Attributes:
        own_s: Processor time of no request.
    """

    def __init__(self) -> None:
        self.own_s = 0.0
        self._holders: dict[Hashable, _Holder] = {}
        self._read_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._holders

    def begin(self, holder: Hashable, slots: int, now_s: float) -> None:
        """A request got slots; where it is the first, `read` is to be called before."""
        self._holders[holder] = _Holder(slots, now_s)

    def read(self, cpu_s: float, now_s: float) -> None:
        """Share the processor time since the last reading.

        Args:
            cpu_s: Of the process, since its start.
            now_s: Monotonic.
        """
        taken_s, self._read_s = max(0.0, cpu_s - self._read_s), max(cpu_s, self._read_s)
        holders = self._holders.values()
        whole = sum(one.slots * (now_s - one.since_s) for one in holders)
        if not whole:
            self.own_s += taken_s
            return
        for one in holders:
            one.cpu_s += taken_s * one.slots * (now_s - one.since_s) / whole
            one.since_s = now_s

    def end(self, holder: Hashable) -> float:
        """Its slots are free, after `read`; return its processor time."""
        found = self._holders.pop(holder, None)
        return found.cpu_s if found else 0.0
