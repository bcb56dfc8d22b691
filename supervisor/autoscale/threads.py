"""Decides how many threads decode, by what the machine has to give.

How many threads decode, by what the machine has to give. Threads of one operation wait for each
other after each, so one that waits for its core delays all: on 2 cores with one more busy program,
2 threads of SmolLM2 made 37 tokens/s and 1 made 82; alone they made 139 and 91 (build 10434). So
threads take all performance cores that are free.

Every change replaces an instance. Therefore a load must last before the threads give way to it, and
its absence must last far longer before they come back.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supervisor.autoscale.slots import Change, ModelView
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import ReplicaId
from supervisor.plan.auto import fastest
from supervisor.plan.plan import Plan
from supervisor.plan.setting import Setting
from supervisor.system import machine
from supervisor.system.machine import Machine
from supervisor.system.processor_load import (
    ProcessorLoad,
    ProcessorReading,
    processor_load,
    read_this_processor,
)

# Timers are not exact, and neither are the ends of spans.
_TOLERANCE: Final = 0.9
# From here on, instances that compute are taken to wait for each other's threads, not to alternate.
_PRESSURE: Final = 0.5
_BUSY: Final = 0.1


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The load of a few seconds.

    Attributes:
        load: What the machine did.
        busy: Share of the time in which the decode threads of each instance of ours computed, by
            its name.
    """

    load: ProcessorLoad
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def others_cores(self) -> float | None:
        """Cores of other programs; estimated by the time that tasks waited where unknown."""
        load = self.load
        return load.pressure if load.others_cores is None else load.others_cores


def last_samples(samples: Sequence[LoadSample], span_s: float) -> list[LoadSample]:
    """The last samples with known load that cover a span; none if there are too few."""
    if not samples:
        return []
    since_s = samples[-1].load.at_s - span_s / _TOLERANCE
    found = [
        sample
        for sample in samples
        if sample.load.at_s > since_s and sample.others_cores is not None
    ]
    covered_s, count = 0.0, 0
    for sample in reversed(found):
        if covered_s >= span_s * _TOLERANCE:
            break
        covered_s, count = covered_s + sample.load.span_s, count + 1
    return found[len(found) - count :] if covered_s >= span_s * _TOLERANCE else []


def mean_others_cores(samples: Iterable[LoadSample]) -> float:
    known = [(sample.others_cores, sample.load.span_s) for sample in samples]
    taken = [(cores * span_s, span_s) for cores, span_s in known if cores is not None]
    return sum(cores_s for cores_s, _ in taken) / (sum(span_s for _, span_s in taken) or 1)


def mean_sharing(samples: Iterable[LoadSample], name: str) -> float:
    """The mean number of instances that compute while this one does, at least 1."""
    own = busy_samples(samples, name)
    return 1 + sum(sum(_overlaps(sample, name)) for sample in own) / max(1, len(own))


def busy_samples(samples: Iterable[LoadSample], name: str) -> Sequence[LoadSample]:
    return [sample for sample in samples if sample.busy.get(name, 0) >= _BUSY]


def _overlaps(sample: LoadSample, name: str) -> Iterable[float]:
    """For each other instance, the share of the time in which it wants to compute as well.

    Threads that wait for a core do not compute, so what they took is too little to go by then.
    """
    waits = (sample.load.pressure or 0) >= _PRESSURE
    for other, busy in sample.busy.items():
        if other != name and busy >= _BUSY:
            yield 1.0 if waits else min(1.0, busy)


ORIGIN: Final = "machine"
# The threads give way to a load that lasts so long, and come back after so long without it. Within
# the longest span short loads add up: loads that come and go every few minutes change nothing.
_QUICK_S: Final = 15.0
_SLOW_S: Final = 120.0
_LONGEST_S: Final = 300.0
HISTORY_S: Final = 600.0
# A program takes a core from so much of it on, and leaves it below so much: it gets less than it
# wants while it shares the core with a thread of ours.
_TAKES_CORES: Final = 0.4
_LEAVES_CORES: Final = 0.2
# Likewise, the share of the time in which another instance computes beside one.
_TAKES_TIME: Final = 0.6
_LEAVES_TIME: Final = 0.4
# Less of an instance's computing says too little about what the others do meanwhile.
_EVIDENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ThreadsInputs:
    """What the number of threads depends on.

    Attributes:
        machine: Its cores.
        samples: Of the last ten minutes, the oldest first.
        instances: Names of the model's instances.
        current: The threads that they have.
        speeds: Measured tokens per second on an idle machine, by number of threads.
    """

    machine: Machine
    samples: Sequence[LoadSample]
    instances: Collection[str]
    current: int
    speeds: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Claims:
    """What is not there for one instance."""

    others_cores: float  # mean
    cores: int  # whole ones that other programs take
    instances: int  # of ours that compute at the same time, with this one

    def threads(self, inputs: ThreadsInputs) -> int:
        machine, wanted = inputs.machine, _threads_alone(inputs)
        # Cores that we do not decode on are there for other programs first.
        free = machine.physical_cores + machine.quota_spare_cores - self.cores
        return max(1, (min(wanted, free) if self.cores else wanted) // self.instances)


def decide_threads(inputs: ThreadsInputs) -> Setting:
    """Decide the number of threads; the current one stays while there is too little evidence."""
    now, lately, count = _claims_now(inputs), _claims_lately(inputs), inputs.current
    claims = lately or now
    if now and now.threads(inputs) < count:
        count, claims = now.threads(inputs), now
    elif lately and lately.threads(inputs) > count:
        count = lately.threads(inputs)
    return Setting(count, ORIGIN, _reason(inputs, count, claims))


def _claims_now(inputs: ThreadsInputs) -> _Claims | None:
    """Claims that all of the last samples agree on."""
    samples = last_samples(inputs.samples, _QUICK_S)
    if not samples:
        return None
    lasts = min(sample.others_cores or 0.0 for sample in samples) >= _LEAVES_CORES
    sharing = min(
        max(mean_sharing([sample], name) for name in inputs.instances) for sample in samples
    )
    others = mean_others_cores(samples) if lasts else 0.0
    return _Claims(others, _round_cores(others, _TAKES_CORES), _round_cores(sharing, _TAKES_TIME))


def _claims_lately(inputs: ThreadsInputs) -> _Claims | None:
    """Claims of the last minutes, as large as over any of the spans."""
    if not last_samples(inputs.samples, _SLOW_S):
        return None
    spans = [last_samples(inputs.samples, span_s) for span_s in (_QUICK_S, _SLOW_S, _LONGEST_S)]
    # Until there are samples of the longest span, those that there are count.
    others = max(mean_others_cores(span or inputs.samples) for span in spans)
    sharing = _sharing_lately(inputs)
    return _Claims(others, _round_cores(others, _LEAVES_CORES), _round_cores(sharing, _LEAVES_TIME))


def _round_cores(amount: float, least: float) -> int:
    """Round up from `least` of the last one on."""
    return math.floor(amount + 1 - least)


def _sharing_lately(inputs: ThreadsInputs) -> float:
    """As `mean_sharing`; all instances that run count while these were hardly used."""
    found = [
        mean_sharing(inputs.samples, name)
        for name in inputs.instances
        if sum(sample.load.span_s for sample in busy_samples(inputs.samples, name)) >= _EVIDENCE_S
    ]
    return max(found, default=float(max(1, len(inputs.samples[-1].busy))))


def _threads_alone(inputs: ThreadsInputs) -> int:
    """The threads of an instance that has the machine to itself."""
    return fastest(inputs.speeds, inputs.machine.decode_cores)


def _reason(inputs: ThreadsInputs, count: int, claims: _Claims | None) -> str:
    machine, found = inputs.machine, [*_texts(claims)]
    kind = machine.decode_core_kind
    if count < machine.decode_cores:
        if inputs.speeds and count == _threads_alone(inputs):
            found = ["measured fastest"]
        why = " and ".join(found) or "the machine was not observed for long enough to change it"
        return f"{count} of {_count_text(machine.decode_cores, kind)}: {why}"
    why = " and ".join(found) or "the machine is idle otherwise"
    return f"{_count_text(machine.decode_cores, kind)}, {why}"


def _texts(claims: _Claims | None) -> Iterable[str]:
    if claims and claims.others_cores >= _LEAVES_CORES:
        yield f"other programs take {claims.others_cores:.1f} cores"
    if claims and claims.instances > 1:
        yield f"{claims.instances} instances compute at the same time"


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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
            processes = [*self._processes()]
            before = self._before
            self._before = self._read([os.getpid(), *(process.pid for process in processes)])
            if before:
                load = processor_load(before, self._before)
                self._samples.append(LoadSample(load, _busy(processes, load.own_cores)))

    def changes(self, model: ModelView) -> Sequence[Change]:
        current = threads_of(model.plan)
        if current is None or not _may_change(model):
            return ()
        setting = self._decide(model, current)
        count = int(setting.value)
        if count == current:
            self._wanted.pop(model.name, None)
            return ()
        is_fewer = count < current
        known = self._wanted.get(model.name)
        if known is None or known.threads != count:
            known = self._wanted[model.name] = _Wanted(count, model.at_s)
        patience_s = _PATIENCE_FEWER_S if is_fewer else _PATIENCE_MORE_S
        is_urgent = model.at_s - known.since_s >= patience_s
        to = None if count == threads_of(model.base) else setting
        return (Change(THREADS, to, setting.reason, is_urgent=is_urgent),)

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

    def _speeds_of(self, model: ModelView) -> Mapping[int, float]:
        """Return the measured speeds, read once per run."""
        known = self._speeds.get(model.name)
        if known is None or known[0] is not model.plan:
            known = self._speeds[model.name] = model.plan, self._read_speeds(model.base)
        return known[1]

    def _forget_others(self, names: Collection[str]) -> None:
        self._wanted = {name: wanted for name, wanted in self._wanted.items() if name in names}
        self._speeds = {name: speed for name, speed in self._speeds.items() if name in names}


def _busy(
    processes: Iterable[EngineProcess], own_cores: Mapping[int, float]
) -> Mapping[str, float]:
    """The share of the time in which the threads of each place computed."""
    busy: dict[str, float] = {}
    for process in processes:
        share = min(1.0, own_cores.get(process.pid, 0) / process.threads)
        busy[process.place] = max(share, busy.get(process.place, 0))
    return busy


def _may_change(model: ModelView) -> bool:
    """Whether the threads are ours to choose, and decode; a trial compares what it was told to."""
    is_here = not (model.plan.engine.devices or model.plan.workers)
    decodes = model.plan.embedding is None and is_here
    return decodes and THREADS in model.base.derived and model.settings.trial is None
