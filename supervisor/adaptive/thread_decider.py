"""Wants as many decode threads as `threads` decides, from readings of this machine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.adaptive.change import Change, ModelView
from supervisor.adaptive.engine_processes import THREADS, EngineProcess, threads_of
from supervisor.adaptive.load_samples import LoadSample
from supervisor.adaptive.threads import HISTORY_S, ThreadsInputs, decide_threads
from supervisor.flags.plan import Plan
from supervisor.flags.setting import Setting
from supervisor.fleet.launch_id import ReplicaId
from supervisor.host import machine
from supervisor.host.machine import Machine
from supervisor.host.processor_load import ProcessorReading, processor_load, read_this_processor

# The kernel counts hundredths of a second, so a shorter time says little.
_SAMPLE_MIN_S: Final = 4.0
# A model that is never without requests is changed while it has some, after so long: they complete
# where they are. With too many threads it decodes at less than half of its speed, with too few at
# more.
_PATIENCE_FEWER_S: Final = 15.0
_PATIENCE_MORE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class _Wanted:
    threads: int
    since_s: float


class ThreadDecider:
    """Decides the threads of all models whose `threads` are auto and which no device computes.

    Args:
        processes: Returns all engines that run.
        speeds: Returns the measured speeds of a plan's model by number of threads.
        is_measuring: Whether a command measures engines of its own: what they take does not last,
            and a replacement beside them would disturb the measurement.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[EngineProcess]],
        speeds: Callable[[Plan], Mapping[int, float]],
        *,
        is_measuring: Callable[[], bool] = lambda: False,
        read: Callable[[Collection[int]], ProcessorReading] = read_this_processor,
        read_machine: Callable[[], Machine] = machine.read,
    ) -> None:
        self._processes = processes
        self._read_speeds = speeds
        self._is_measuring = is_measuring
        self._read = read
        self._read_machine = read_machine
        self._before: ProcessorReading | None = None
        self._samples: deque[LoadSample] = deque(maxlen=int(HISTORY_S / _SAMPLE_MIN_S))
        self._wanted: dict[str, _Wanted] = {}
        self._speeds: dict[str, tuple[Plan, Mapping[int, float]]] = {}

    def sample(self, models: Sequence[ModelView]) -> None:
        """Read the counters; without a loaded model there is nothing to read them for."""
        self._forget_others({model.name for model in models})
        if not models or self._is_measuring():
            self._before = None
        elif self._before is None or models[0].at_s - self._before.at_s >= _SAMPLE_MIN_S:
            self._note([*self._processes()])

    def changes(self, model: ModelView) -> Sequence[Change]:
        current = threads_of(model.plan)
        if current is None or not _may_change(model):
            return ()
        setting = self._decide(model, current)
        count = int(setting.value)
        if count == current:
            self._wanted.pop(model.name, None)
            return ()
        is_urgent = self._is_urgent(model, count, is_fewer=count < current)
        to = None if count == threads_of(model.base) else setting
        return (Change(THREADS, to, setting.reason, is_urgent=is_urgent),)

    def _note(self, processes: Sequence[EngineProcess]) -> None:
        before = self._before
        self._before = self._read([os.getpid(), *(one.pid for one in processes)])
        if before:
            load = processor_load(before, self._before)
            self._samples.append(LoadSample(load, _busy(processes, load.own_cores)))

    def _decide(self, model: ModelView, current: int) -> Setting:
        inputs = ThreadsInputs(
            machine=self._read_machine(),
            samples=self._samples,
            instances=[
                str(ReplicaId(model.name, number)) for number in range(len(model.instances))
            ],
            current=current,
            speeds=self._speeds_of(model),
        )
        return decide_threads(inputs)

    def _is_urgent(self, model: ModelView, count: int, *, is_fewer: bool) -> bool:
        """Whether the model is to be changed although it has requests."""
        known = self._wanted.get(model.name)
        if known is None or known.threads != count:
            known = self._wanted[model.name] = _Wanted(count, model.at_s)
        patience_s = _PATIENCE_FEWER_S if is_fewer else _PATIENCE_MORE_S
        return model.at_s - known.since_s >= patience_s

    def _speeds_of(self, model: ModelView) -> Mapping[int, float]:
        """Return the measured speeds, read once per run."""
        known = self._speeds.get(model.name)
        if known is None or known[0] is not model.plan:
            known = self._speeds[model.name] = model.plan, self._read_speeds(model.base)
        return known[1]

    def _forget_others(self, names: Collection[str]) -> None:
        self._wanted = {name: one for name, one in self._wanted.items() if name in names}
        self._speeds = {name: one for name, one in self._speeds.items() if name in names}


def _busy(
    processes: Iterable[EngineProcess], own_cores: Mapping[int, float]
) -> Mapping[str, float]:
    """The share of the time in which the threads of each place computed."""
    busy: dict[str, float] = {}
    for one in processes:
        share = min(1.0, own_cores.get(one.pid, 0) / one.threads)
        busy[one.place] = max(share, busy.get(one.place, 0))
    return busy


def _may_change(model: ModelView) -> bool:
    """Whether the threads are ours to choose, and decode; a trial compares what it was told to."""
    is_here = not (model.plan.engine.devices or model.plan.workers)
    decodes = model.plan.embedding is None and is_here
    return decodes and THREADS in model.base.derived and model.settings.trial is None
