"""What models take of this machine's memory, what they may take, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from supervisor.admission.evict import Bytes
from supervisor.admission.observed_memory import ObservedMemory
from supervisor.errors import CorralError
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.process_memory import memory_bytes, own_bytes
from supervisor.host import machine
from supervisor.host.machine import Machine
from supervisor.instance.states import State
from supervisor.memory.estimate import Estimate
from supervisor.memory.fit import RESERVE_SHARE

HOST = "host"


class MemoryUsage:
    """Books of memory.

    Args:
        fleet: Every model.
        read_machine: Tells how much memory there is.
        measured: What instances were seen to take; nothing yet where None.
    """

    def __init__(
        self,
        fleet: Fleet,
        read_machine: Callable[[], Machine] = machine.read,
        measured: ObservedMemory | None = None,
    ) -> None:
        self._fleet = fleet
        self._read_machine = read_machine
        self._planner = fleet.planner
        self._estimates: dict[str, Estimate | None] = {}
        self._measured = measured or ObservedMemory()

    def capacity(self) -> Bytes:
        """Return what models may take of each memory when none is up."""
        try:
            found = self._fleet.planner.capacity(self._fleet.planner.engine())
        except CorralError:  # without an engine nothing comes up, and its start says why
            return {}
        return {HOST: found.host, **found.devices}

    def free(self) -> Bytes:
        """Return what they may still take: of the room, and of what the machine has free.

        What a model that is coming has yet to take is not free any more.
        """
        left = Counter(self.capacity())
        outstanding = 0
        for model in self._fleet.models.values():
            present = [replica for replica in model.all_replicas if _is_present(replica)]
            if present:
                takes = self._of(model, present)
                left.subtract(takes)
                outstanding += max(0, takes[HOST] - sum(map(_resident, present)))
        here = self._read_machine()
        available = here.memory_available_bytes - int(here.memory_bytes * RESERVE_SHARE)
        return {**left, HOST: min(left[HOST], available - outstanding)}

    def required(self, model: Model) -> Bytes:
        """Return what a model takes, or would take: the weights that it maps once for all.

        One that was seen to grow beyond all the room there is would take all of it.
        """
        takes, found = self._of(model, model.replicas), self._estimate(model)
        if found:
            at_start = found.mapped_bytes + found.own_at_start_bytes * len(model.replicas)
            takes[HOST] = max(at_start, min(takes[HOST], self.capacity().get(HOST, 0)))
        return takes

    def _of(self, model: Model, replicas: Iterable[Replica]) -> Counter[str]:
        found = self._estimate(model)
        if found is None:
            return Counter()
        takes = Counter({HOST: found.mapped_bytes})
        for replica in replicas:
            takes[HOST] += max(found.own_at_start_bytes, self._own(replica))
            takes.update({name: take.total for name, take in found.devices.items()})
        return takes

    def _own(self, replica: Replica) -> int:
        """Return the most that an instance was seen to take for itself; 0 before it ran."""
        pid = replica.instance.snapshot().pid
        if replica.fingerprint is None:
            return 0
        if pid:
            self._measured.note(replica.fingerprint, own_bytes(pid) or 0)
        return self._measured.own_bytes(replica.fingerprint)

    def _estimate(self, model: Model) -> Estimate | None:
        """Return what one instance takes by estimate; None where it cannot be planned."""
        name, planner = model.entry.name, self._fleet.planner
        if planner is not self._planner:
            self._planner, self._estimates = planner, {}
        if name not in self._estimates:
            try:
                self._estimates[name] = planner.plan(name).estimate
            except CorralError:  # whose start says why
                self._estimates[name] = None
        return self._estimates[name]


def _is_present(replica: Replica) -> bool:
    return replica.instance.snapshot().state not in {State.STOPPED, State.FAILED}


def _resident(replica: Replica) -> int:
    pid = replica.instance.snapshot().pid
    return memory_bytes(pid) or 0 if pid else 0
