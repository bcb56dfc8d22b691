"""The progress of a bench with the time that remains, as a meter's line."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from supervisor.bench.limits import RoundLimits
from supervisor.output import ProgressMeter, duration

_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a round: the start of a variant, or one of its workloads."""

    variant: str
    what: str


class Timeline:
    """How long steps took, and how long the rest will take."""

    def __init__(self, round_steps: Sequence[Step], limits: RoundLimits) -> None:
        self._round = round_steps
        self._limits = limits
        self._took_s: dict[Step, list[float]] = defaultdict(list)
        self._done: list[Step] = []  # of the present round

    def begin_round(self) -> None:
        self._done.clear()

    def add(self, step: Step, took_s: float) -> None:
        self._took_s[step].append(took_s)
        self._done.append(step)

    def remaining_s(self, rounds_done: int, step: Step, step_s: float, elapsed_s: float) -> float:
        """The time that remains; an estimate, never negative.

        Args:
            rounds_done: Complete rounds.
            step: The one that runs.
            step_s: For how long it has run.
            elapsed_s: Since the first round began.
        """
        ahead = [one for one in self._round if one not in self._done and one != step]
        present_s = max(0.0, self._mean_s(step) - step_s)
        rest_s = present_s + sum(map(self._mean_s, ahead))
        round_s = sum(map(self._mean_s, self._round))
        further = max(0, self._limits.repeats - rounds_done - 1)
        if self._limits.limit_s is None:
            return rest_s + further * round_s
        left_s = self._limits.limit_s - elapsed_s - rest_s
        fitting = min(further, int(left_s / round_s) if round_s > 0 else 0)
        return rest_s + max(0, fitting) * round_s

    def _mean_s(self, step: Step) -> float:
        """Of this step; else of the same step of other variants; else of all."""
        same = [s for one, took in self._took_s.items() if one.what == step.what for s in took]
        every = [s for took in self._took_s.values() for s in took]
        found = self._took_s.get(step) or same or every
        return statistics.fmean(found) if found else 0.0


class Progress:
    """Shows the steps of a bench."""

    def __init__(
        self, label: str, timeline: Timeline, limits: RoundLimits, meter: ProgressMeter
    ) -> None:
        self._label = label
        self._timeline = timeline
        self._limits = limits
        self._meter = meter
        self._began_s = self._step_began_s = time.monotonic()
        self._round = 0
        self._step: Step | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def begin_round(self) -> None:
        if self._round == 0:
            self._began_s = time.monotonic()
        self._round += 1
        self._timeline.begin_round()

    @contextmanager
    def step(self, variant: str, what: str) -> Iterator[None]:
        self._step, self._step_began_s = Step(variant, what), time.monotonic()
        self.show()
        yield
        self._timeline.add(self._step, time.monotonic() - self._step_began_s)

    def show(self) -> None:
        if self._step is None:
            return
        step_s = time.monotonic() - self._step_began_s
        what = f"{self._step.variant}: {self._step.what}"
        if self._round == 0:
            self._meter.show(self._label, 0.0, f"first start · {what}")
            return
        left_s = self._timeline.remaining_s(self._round - 1, self._step, step_s, self.elapsed_s)
        whole_s = self.elapsed_s + left_s
        planned = self._limits.planned
        number = f"round {self._round}" + (f" of {planned}" if planned else "")
        left = f"{duration(left_s)} left · " if left_s else ""
        self._meter.show(
            self._label, self.elapsed_s / whole_s if whole_s else 0.0, f"{left}{number} · {what}"
        )


@contextmanager
def ticking(show: Callable[[], None]) -> Iterator[None]:
    """Call it twice a second during the block."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer
        show()
        timer = loop.call_later(_EVERY_S, tick)

    timer = loop.call_later(_EVERY_S, tick)
    try:
        yield
    finally:
        timer.cancel()
