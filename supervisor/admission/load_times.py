"""How long models take to load, by their past loads."""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Final

from supervisor.fleet.availability import Phase

_LOADS_MAX: Final = 5
# Less of a load says too little of the rest.
_PROGRESS_MIN: Final = 0.1
_LEFT_MIN_S: Final = 0.05


class LoadTimes:
    def __init__(self) -> None:
        self._began_at_s: dict[str, float] = {}
        self._latest_s: dict[str, deque[float]] = {}

    def begin(self, name: str, now_s: float) -> None:
        self._began_at_s.setdefault(name, now_s)

    def observe(self, name: str, phase: Phase, now_s: float) -> None:
        """Take the phase of a model: a load may have ended."""
        if phase is Phase.LOADING or name not in self._began_at_s:
            return
        duration_s = now_s - self._began_at_s.pop(name)
        if phase is Phase.LOADED:
            self._latest_s.setdefault(name, deque(maxlen=_LOADS_MAX)).append(duration_s)

    def usual_s(self, name: str) -> float | None:
        """Return the median of the latest loads; None for a model that was never loaded."""
        latest_s = self._latest_s.get(name)
        # Of two the shorter: the first one reads the file from the disk.
        return median_low(latest_s) if latest_s else None

    def left_s(self, name: str, progress: float, now_s: float) -> float | None:
        """Return how long the load of a model goes on, that is not begun or has come so far."""
        usual_s, began_at_s = self.usual_s(name), self._began_at_s.get(name)
        if began_at_s is None:
            return usual_s
        elapsed_s = now_s - began_at_s
        if usual_s is not None and elapsed_s < usual_s:
            return usual_s - elapsed_s
        if progress >= _PROGRESS_MIN:
            return max(_LEFT_MIN_S, elapsed_s * (1 - progress) / progress)
        return None if usual_s is None else _LEFT_MIN_S
