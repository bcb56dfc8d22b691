"""The engine processes of a fleet, as the decision about threads sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from supervisor.flags.plan import Plan
from supervisor.fleet.fleet import Fleet

THREADS = "threads"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    pid: int
    place: str  # of its replica; a successor has that of its predecessor
    threads: int  # that decode


def engine_processes(fleet: Fleet) -> Iterator[EngineProcess]:
    for replica in fleet.all_replicas():
        if pid := replica.instance.snapshot().pid:
            threads = threads_of(replica.plan) if replica.plan else None
            yield EngineProcess(pid, str(replica.place), threads or 1)


def threads_of(plan: Plan) -> int | None:
    """Return the decode threads of a plan; None if the engine decides."""
    found = plan.memory_inputs.chosen.get(THREADS)
    return found if isinstance(found, int) and found > 0 else None


def measured_speeds(fleet: Fleet) -> Callable[[Plan], Mapping[int, float]]:
    """Return a function that reads the decode speeds of a plan's model by number of threads.

    There are none while not all numbers were measured.
    """

    def read(plan: Plan) -> Mapping[int, float]:
        if plan.untried_threads is not None:
            return {}
        return fleet.planner.measurements(plan.gguf.path, plan.engine).read().decode()

    return read
