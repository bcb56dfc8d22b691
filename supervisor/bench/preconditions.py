"""Whether a machine is free enough to measure on, and what is in the way if not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.bench.variants import VariantSpec
from supervisor.errors import MachineBusy
from supervisor.host.busy_programs import BusyProgram
from supervisor.memory.fit import MemoryCapacity, misfit_reason
from supervisor.output import size

# Threads that decode wait for each other: one that is descheduled delays all. What every machine
# does in the background stays below this.
_FREE_CORES: Final = 0.2
_FREE_SHARE: Final = 0.05
_NAMED_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that the user's daemon holds in memory."""

    name: str
    memory_bytes: int | None
    slots_busy: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine before the first start.

    Attributes:
        capacity: What models may take of each memory.
        available_bytes: Main memory that is free now.
        programs: Those that take processor time, the busiest first.
        loaded: By the user's daemon.
    """

    capacity: MemoryCapacity
    available_bytes: int
    logical_cores: int
    programs: tuple[BusyProgram, ...]
    loaded: tuple[LoadedModel, ...]


def obstacles(facts: MachineFacts, specs: Sequence[VariantSpec]) -> tuple[str, ...]:
    """What is in the way, as clauses; none if the machine is free."""
    return (*_memory(facts, specs), *_processor(facts))


def check(facts: MachineFacts, specs: Sequence[VariantSpec]) -> None:
    """Raise MachineBusy with what is in the way."""
    if found := obstacles(facts, specs):
        raise MachineBusy(
            f"the machine is not free to measure on: {'; '.join(found)}",
            hint=f"{_advice(facts)}, or measure anyway with --force",
        )


def notes(facts: MachineFacts) -> Iterator[str]:
    """What a reader of the result should know, although it is not in the way."""
    if facts.loaded:
        yield f"the daemon kept {_loaded(facts.loaded)} in memory meanwhile"


def note_on_load(others_cores: Sequence[float], logical_cores: int) -> str | None:
    """What other programs took while variants were measured; None if they left them alone."""
    disturbed = [one for one in others_cores if one > _free_cores(logical_cores)]
    if not disturbed:
        return None
    return (
        f"other programs took up to {max(disturbed):.1f} cores, in {len(disturbed)} of "
        f"{len(others_cores)} measurements: repeat it on a free machine"
    )


def _free_cores(logical_cores: int) -> float:
    """What others may take without being in the way."""
    return max(_FREE_CORES, _FREE_SHARE * logical_cores)


def _memory(facts: MachineFacts, specs: Sequence[VariantSpec]) -> Iterator[str]:
    for spec in specs:
        estimate = spec.plan.estimate
        if reason := misfit_reason(estimate, facts.capacity):
            yield f"{spec.name} can never fit: {reason}"
        elif estimate.host.at_start > facts.available_bytes:
            needed, free = size(estimate.host.at_start), size(facts.available_bytes)
            holds = f" (the daemon holds {_loaded(facts.loaded)})" if facts.loaded else ""
            yield f"{spec.name} needs {needed} of main memory, but {free} are free{holds}"


def _processor(facts: MachineFacts) -> Iterator[str]:
    taken = sum(one.cores for one in facts.programs)
    if taken <= _free_cores(facts.logical_cores):
        return
    names = {pid: one.name for one in facts.loaded for pid in one.pids}
    for program in facts.programs[:_NAMED_MAX]:
        if program.pid in names:
            yield f"the daemon's {names[program.pid]} takes {program.cores:.1f} cores"
        else:
            yield f"{program.name} (pid {program.pid}) takes {program.cores:.1f} cores"


def _advice(facts: MachineFacts) -> str:
    if facts.loaded:
        return f"end what it names (corral unload {' '.join(one.name for one in facts.loaded)})"
    return "end what it names"


def _loaded(loaded: Sequence[LoadedModel]) -> str:
    return ", ".join(
        f"{one.name} ({size(one.memory_bytes)}"
        + (f", {one.slots_busy} requests running)" if one.slots_busy else ")")
        for one in loaded
    )
