"""Programs that take processor time, apart from this one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Final

import psutil

# Less is not worth a name.
_NAMED_CORES: Final = 0.05


@dataclass(frozen=True, slots=True)
class BusyProgram:
    """A process, and the processor time that it takes, in cores."""

    pid: int
    name: str
    cores: float


def busy_programs(span_s: float) -> tuple[BusyProgram, ...]:
    """Watch all processes for a moment; return those that take time, the busiest first.

    Processes that began or ended meanwhile are not seen. Blocks for the span.
    """
    before = _used_s()
    began_s = time.monotonic()
    time.sleep(span_s)
    took_s = time.monotonic() - began_s
    found = [
        BusyProgram(process.pid, name, (used_s - before[process][1]) / took_s)
        for process, (name, used_s) in _used_s().items()
        if process in before
    ]
    busy = [one for one in found if one.cores >= _NAMED_CORES and one.pid != os.getpid()]
    return tuple(sorted(busy, key=lambda one: -one.cores))


def _used_s() -> dict[psutil.Process, tuple[str, float]]:
    """The name of each process, and the processor time that it has used.

    A process equals another only if its number and its creation time do.
    """
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            found[process] = (process.info["name"] or "?", float(times.user + times.system))
    return found
