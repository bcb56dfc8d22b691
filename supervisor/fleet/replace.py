"""Replaces a running instance by one of a new plan.

A successor starts beside an instance that serves if memory holds both for a while. Once the
successor serves, it takes over, and the old instance finishes its requests and ends. Otherwise the
instance drains and starts again, if the caller accepts that.

Main memory is estimated before a start, because a machine that runs out of memory kills any
process. Device memory is not: its free bytes are unknown without a start, and a start that finds
too little does no harm.

Running instances are changed one at a time: callers hold `lock`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.states import InstanceSnapshot, State
from supervisor.fleet.fleet import START_OVER, Fleet
from supervisor.fleet.launches import ReplicaId
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.start_memory import OUT_OF_MEMORY, usable_bytes
from supervisor.fleet.stats import own_bytes
from supervisor.plan.plan import Plan
from supervisor.system import machine
from supervisor.system.machine import Machine

_SERVING: Final = frozenset({State.READY, State.UNHEALTHY})


# A successor starts beside the instance, which then drains; or the instance drains and starts
# again; or nothing happens now, because the instance is not wanted.
ReplaceStrategy = Literal["rolling", "restart", "on next start"]


def strategy_for(snapshot: InstanceSnapshot, *, has_room: bool) -> ReplaceStrategy:
    if not snapshot.wanted:
        return "on next start"
    if snapshot.state in _SERVING and has_room:
        return "rolling"
    return "restart"


def serves(snapshot: InstanceSnapshot) -> bool:
    return snapshot.wanted and snapshot.state in _SERVING


def need_bytes(own_bytes: int, before: Plan, after: Plan) -> int:
    """Return how much main memory a successor takes beside the instance that it replaces.

    Weights that both map from the same file are in memory once. The successor's prompt cache is
    empty at first, and the old one is freed before it fills. Memory that the old instance takes
    beyond its estimate is added, because its successor will take it too.

    `own_bytes` is the old instance's memory without mapped files.
    """
    coming = after.estimate
    beyond = max(0, own_bytes - before.estimate.own_bytes)
    is_same_file = before.gguf.fingerprint == after.gguf.fingerprint
    weights = 0 if is_same_file and before.gguf.path == after.gguf.path else coming.mapped_bytes
    return coming.own_at_start_bytes + beyond + weights


@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """A replica that did not start; `stays` if it serves, or soon will, with its old settings."""

    place: ReplicaId
    cause: FailureCause | None
    log_path: Path | None
    stays: bool

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" + (
            "; it keeps its old settings" if self.stays else ""
        )

    @property
    def reason(self) -> str:
        return self.cause.sentence if self.cause else "it did not start"


class Replacer:
    """Replaces instances of a fleet; the caller of each method holds `lock`."""

    def __init__(self, fleet: Fleet, read_machine: Callable[[], Machine] = machine.read) -> None:
        self.lock = asyncio.Lock()
        self._fleet = fleet
        self._read_machine = read_machine

    async def replace(
        self, replica: Replica, planner: LaunchPlanner, after: Plan
    ) -> ReplicaFailure | None:
        """Replace an instance by a successor, or in place, or on its next start if not wanted."""
        match self._strategy(replica, after):
            case "on next start":
                self._fleet.apply_settings(replica, planner)
                return None
            case "restart":
                return await self._restart_with(replica, planner)
            case "rolling":
                return await self._replace_rolling(replica, planner)

    async def replace_beside(
        self, replica: Replica, planner: LaunchPlanner, after: Plan
    ) -> ReplicaFailure | bool:
        """Replace a serving instance if memory allows a successor beside it.

        Returns whether it was replaced, or the successor's failure. Otherwise, or if it is stopped
        meanwhile, nothing is changed.
        """
        if self._strategy(replica, after) != "rolling":
            return False
        snapshot = await self._start_beside(replica, planner)
        if snapshot is None:
            return True
        return _failure(replica, snapshot, stays=True) if snapshot.wanted else False

    def _strategy(self, replica: Replica, after: Plan) -> ReplaceStrategy:
        need = successor_bytes(replica, after)
        has_memory = need is None or need <= usable_bytes(self._read_machine())
        has_workers = bool(after.workers or (replica.plan and replica.plan.workers))
        has_room = has_memory and not has_workers
        return strategy_for(replica.instance.snapshot(), has_room=has_room)

    async def _replace_rolling(self, old: Replica, planner: LaunchPlanner) -> ReplicaFailure | None:
        snapshot = await self._start_beside(old, planner)
        if snapshot is None:
            return None
        if not snapshot.wanted:  # the model was stopped meanwhile
            self._fleet.apply_settings(old, planner)
            return None
        if snapshot.cause and snapshot.cause.code in OUT_OF_MEMORY:
            # A restart frees the memory of its predecessor first.
            return await self._restart_with(old, planner)
        return _failure(old, snapshot, stays=True)

    async def _start_beside(self, old: Replica, planner: LaunchPlanner) -> InstanceSnapshot | None:
        """Return None once a successor has taken over, or the snapshot of its failure."""
        new = self._fleet.add_beside(old, planner)
        new.instance.start()
        snapshot = await wait_settled(new)
        if snapshot.state is State.READY:
            self._fleet.replace(old, new)
            return None
        self._fleet.retire(new)
        return snapshot

    async def _restart_with(
        self, replica: Replica, planner: LaunchPlanner
    ) -> ReplicaFailure | None:
        before, served = replica.planner, serves(replica.instance.snapshot())
        self._fleet.apply_settings(replica, planner)
        replica.instance.restart()
        snapshot = await replica.instance.wait(START_OVER)
        if snapshot.state is State.READY or not snapshot.wanted:
            return None
        if served:
            self._fleet.apply_settings(replica, before)
            replica.instance.start()
        return _failure(replica, snapshot, stays=served)


def successor_bytes(replica: Replica, after: Plan) -> int | None:
    """Return how much main memory a successor takes beside a replica; None if unknown."""
    pid = replica.instance.snapshot().pid
    own = own_bytes(pid) if pid else None
    if own is None or replica.plan is None:
        return None
    return need_bytes(own, replica.plan, after)


def _failure(replica: Replica, failed: InstanceSnapshot, *, stays: bool) -> ReplicaFailure:
    return ReplicaFailure(replica.place, failed.cause, failed.log_path, stays)


async def start_failure(replica: Replica) -> ReplicaFailure | None:
    """Wait until a replica that was just started serves; return its failure, if any."""
    snapshot = await wait_settled(replica)
    if snapshot.state is State.READY or not snapshot.wanted:
        return None
    return _failure(replica, snapshot, stays=False)


async def wait_settled(replica: Replica) -> InstanceSnapshot:
    """Wait until a replica that was just started serves, or has failed once.

    It is STOPPED until its own task has read the command. The deadlines are those of its states.
    """
    await replica.instance.wait(frozenset(State) - {State.STOPPED})
    return await replica.instance.wait(START_OVER)
