"""Checks whether other programs take the processor time that decoding needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from supervisor.doctor.finding import Finding
from supervisor.host.processor_load import ProcessorReading, processor_load, read_this_processor

_NAME: Final = "processor load"
_SPAN_S: Final = 0.3
# As much as one busy program gets of a core that it shares with a thread.
_BUSY_CORES: Final = 0.5


def check_processor(
    own_pids: Iterable[int], read: Callable[[Iterable[int]], ProcessorReading] = read_this_processor
) -> Finding:
    """Measure for a moment; `own_pids` are those of the daemon and its engines."""
    pids = tuple(own_pids)
    before = read(pids)
    time.sleep(_SPAN_S)
    found = processor_load(before, read(pids))
    if found.others_cores is None and found.pressure is None:
        text = "/proc/stat and /proc/pressure/cpu cannot be read, so threads do not follow the load"
        return Finding(_NAME, "warn", text, "set threads of the models to what suits this machine")
    if found.others_cores is None:
        return Finding(_NAME, "ok", f"tasks waited {found.pressure:.0%} of the time")
    text = f"other programs take {found.others_cores:.1f} cores"
    if found.others_cores < _BUSY_CORES:
        return Finding(_NAME, "ok", text)
    return Finding(_NAME, "warn", text, "end them, or lower their priority (renice 10 -p PID)")
