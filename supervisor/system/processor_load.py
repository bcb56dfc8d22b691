"""Measures the processor time that other programs take, and names those programs.

The load is the difference between two readings of the kernel's counters.

Sources: proc(5), /proc/stat and /proc/PID/stat; Linux, Documentation/accounting/psi.rst.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from supervisor.system.limits import kernel_text, pressure_file
from supervisor.system.machine import allowed_cpus

# Programs that take less are not listed.
_NAMED_CORES: Final = 0.05


# The pid of a process, its name, and the processor time that it takes, in cores.
BusyProgram = tuple[int, str, float]


def busy_programs(span_s: float) -> tuple[BusyProgram, ...]:
    """Return processes busy for `span_s`, busiest first; none that starts or ends. Blocks."""
    before = _used_s()
    began_s = time.monotonic()
    time.sleep(span_s)
    took_s = time.monotonic() - began_s
    busy = []
    for process, (name, used_s) in _used_s().items():
        if process in before and process.pid != os.getpid():
            cores = (used_s - before[process][1]) / took_s
            busy += [(process.pid, name, cores)] if cores >= _NAMED_CORES else []
    return tuple(sorted(busy, key=lambda program: -program[2]))


def _used_s() -> dict[psutil.Process, tuple[str, float]]:
    """Return the name of each process and its processor time, by pid and creation time."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            found[process] = (process.info["name"] or "?", float(times.user + times.system))
    return found


_TICKS: Final = os.sysconf("SC_CLK_TCK")
_STALLED: Final = re.compile(r"^some .*\btotal=([0-9]{1,20})$", re.MULTILINE)
# If our processes take less, programs of low priority do not compete with them.
_OWN_BUSY_CORES: Final = 0.5


@dataclass(frozen=True, slots=True)
class ProcessorReading:
    """Counters at one moment, in seconds of processor time since the start of the machine."""

    at_s: float  # monotonic
    busy_s: float | None  # all CPUs of the affinity, with stolen time and without `nice_s`
    nice_s: float  # programs of low priority
    stalled_s: float | None  # time in which a task waited for a processor
    own_s: Mapping[int, float]  # by pid, since the start of the process
    is_low_priority: bool  # whether this process itself is counted in `nice_s`


@dataclass(frozen=True, slots=True)
class ProcessorLoad:
    """The load between two readings."""

    at_s: float  # monotonic time of the second reading
    span_s: float  # time between the readings
    # Cores that other programs and other virtual machines took; None if unknown.
    others_cores: float | None = None
    # Share of the time in which a task waited for a processor; None if unknown.
    pressure: float | None = None
    # Cores that each of our processes took, by pid.
    own_cores: Mapping[int, float] = field(default_factory=dict)


def read_processor(root: Path, allowed: frozenset[int], pids: Iterable[int]) -> ProcessorReading:
    """Read counters below `root` of `allowed` CPUs and our `pids`; None or none if unreadable."""
    busy_s, nice_s = _busy(kernel_text(root / "proc/stat"), allowed)
    own = {pid: _process_s(kernel_text(root / f"proc/{pid}/stat")) for pid in pids}
    stalled = _STALLED.search(kernel_text(pressure_file(root) or root / "proc/pressure/cpu"))
    return ProcessorReading(
        at_s=time.monotonic(),
        busy_s=busy_s,
        nice_s=nice_s,
        stalled_s=int(stalled[1]) / 1_000_000 if stalled else None,
        own_s={pid: taken_s for pid, taken_s in own.items() if taken_s is not None},
        is_low_priority=os.getpriority(os.PRIO_PROCESS, 0) > 0,
    )


def process_s(pid: int) -> float | None:
    """Return the processor time of a process since its start; None if it is unknown."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _process_s(os.read(file, 4096).decode(errors="replace"))
    except OSError:  # it has ended
        return None
    finally:
        os.close(file)


def read_this_processor(pids: Iterable[int]) -> ProcessorReading:
    return read_processor(Path("/"), allowed_cpus(), pids)


def processor_load(before: ProcessorReading, after: ProcessorReading) -> ProcessorLoad:
    span_s = after.at_s - before.at_s
    if span_s <= 0:
        return ProcessorLoad(after.at_s, 0)
    own = {
        pid: _counter_growth(before.own_s.get(pid, 0), now) / span_s
        for pid, now in after.own_s.items()
    }
    pressure = None
    if before.stalled_s is not None and after.stalled_s is not None:
        pressure = min(1.0, max(0.0, after.stalled_s - before.stalled_s) / span_s)
    return ProcessorLoad(
        at_s=after.at_s,
        span_s=span_s,
        others_cores=_others_cores(before, after, sum(own.values()), span_s),
        pressure=pressure,
        own_cores=own,
    )


def _others_cores(
    before: ProcessorReading, after: ProcessorReading, own_cores: float, span_s: float
) -> float | None:
    """Return the cores that were busy with other processes than ours; None if unknown.

    Programs of low priority count only if our processes are busy too, and so compete with them.
    """
    if before.busy_s is None or after.busy_s is None or before.own_s.keys() - after.own_s.keys():
        return None  # a process of ours ended, and its last time is unknown
    busy_s = after.busy_s - before.busy_s
    if after.is_low_priority or own_cores >= _OWN_BUSY_CORES:
        busy_s += after.nice_s - before.nice_s
    # The kernel samples the time of CPUs and measures that of processes.
    return max(0.0, busy_s / span_s - own_cores)


def _counter_growth(before: float, now: float) -> float:
    # A smaller value belongs to a new process with the same pid.
    return now - before if now >= before else now


def _busy(stat: str, allowed: frozenset[int]) -> tuple[float | None, float]:
    """Return the seconds of normal and of low priority; None if none of our CPUs is listed."""
    names = {f"cpu{cpu}" for cpu in allowed}
    lines = [line.split() for line in stat.splitlines()]
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user and nice.
    found = [[int(word) for word in words[1:9]] for words in lines if words[0] in names]
    if not found or any(len(ticks) < 8 for ticks in found):
        return None, 0
    busy = sum(ticks[0] + ticks[2] + sum(ticks[5:8]) for ticks in found)
    return busy / _TICKS, sum(ticks[1] for ticks in found) / _TICKS


def _process_s(stat: str) -> float | None:
    """Return the time of all threads, also ended ones: the 14th and 15th field."""
    # The second field, the name, may contain spaces and parentheses.
    words = stat.rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS if len(words) > 12 else None
