"""Decides how many threads decode, by the load of the machine.

The threads of an operation wait for each other, so a thread that waits for its core delays all: on
2 cores with one more busy program, 2 threads of SmolLM2 made 37 tokens/s and 1 made 82; alone they
made 139 and 91 (build 10434). So threads take all performance cores that are free.

Every change replaces an instance. Therefore a load must last before the threads yield to it, and
its absence must last much longer before they return.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import attrs

from supervisor.autoscale.slots import Change, ModelView
from supervisor.engine.orphans import is_in_use
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import ReplicaId
from supervisor.plan.auto import count_of, fastest_count, known_speeds
from supervisor.plan.plan import Plan
from supervisor.plan.setting import Setting
from supervisor.system import machine
from supervisor.system.machine import Machine
from supervisor.system.paths import Directories
from supervisor.system.processor_load import (
    ProcessorLoad,
    ProcessorReading,
    processor_load,
    read_this_processor,
)

# Timers and the ends of spans are not exact.
_TOLERANCE: Final = 0.9
# From this pressure on, computing instances are assumed to wait for each other, not to alternate.
_PRESSURE: Final = 0.5
_BUSY: Final = 0.1


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The load of a few seconds."""

    load: ProcessorLoad  # the load of the machine
    # The share of the time in which the decode threads of our instances computed, by name.
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def others_cores(self) -> float | None:
        """Cores of other programs; if unknown, estimated by the waiting time of tasks."""
        load = self.load
        return load.pressure if load.others_cores is None else load.others_cores


def last_samples(samples: Sequence[LoadSample], span_s: float) -> list[LoadSample]:
    """Return the last samples with known load that cover a span; none if there are too few."""
    if not samples:
        return []
    since_s = samples[-1].load.at_s - span_s / _TOLERANCE
    lately = (sample for sample in samples if sample.load.at_s > since_s)
    found = [sample for sample in lately if sample.others_cores is not None]
    covered_s, count = 0.0, 0
    for sample in reversed(found):
        if covered_s >= span_s * _TOLERANCE:
            break
        covered_s, count = covered_s + sample.load.span_s, count + 1
    return found[len(found) - count :] if covered_s >= span_s * _TOLERANCE else []


def mean_others_cores(samples: Iterable[LoadSample]) -> float:
    known = [sample for sample in samples if sample.others_cores is not None]
    cores_s = sum((sample.others_cores or 0.0) * sample.load.span_s for sample in known)
    return cores_s / (sum(sample.load.span_s for sample in known) or 1)


def mean_sharing(samples: Iterable[LoadSample], name: str) -> float:
    """Return the mean number of instances that compute while this one does, at least 1.

    Threads that wait for a core do not compute, so while tasks wait, another busy instance counts
    as computing all the time.
    """
    own = busy_samples(samples, name)
    overlap = 0.0
    for sample in own:
        waits = (sample.load.pressure or 0) >= _PRESSURE
        overlap += sum(
            1.0 if waits else min(1.0, busy)
            for other, busy in sample.busy.items()
            if other != name and busy >= _BUSY
        )
    return 1 + overlap / max(1, len(own))


def busy_samples(samples: Iterable[LoadSample], name: str) -> Sequence[LoadSample]:
    return [sample for sample in samples if sample.busy.get(name, 0) >= _BUSY]


ORIGIN: Final = "machine"
# Threads yield to a load of the quick span, and return after the slow span without it. Over the
# longest span short loads add up, so loads that come and go every few minutes change nothing.
_QUICK_S: Final = 15.0
_SLOW_S: Final = 120.0
_LONGEST_S: Final = 300.0
HISTORY_S: Final = 600.0
# Above the first share of a core a program takes it, below the second it leaves it. The second is
# lower, as a program gets less than it wants while it shares the core with a thread of ours.
_TAKES_CORES: Final = 0.4
_LEAVES_CORES: Final = 0.2
# The same for the share of the time in which another instance computes at the same time.
_TAKES_TIME: Final = 0.6
_LEAVES_TIME: Final = 0.4
# A shorter computing time of an instance says too little about simultaneous instances.
_EVIDENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ThreadsInputs:
    machine: Machine
    samples: Sequence[LoadSample]  # the samples of the last ten minutes, the oldest first
    instances: Collection[str]  # names of the model's instances
    current: int  # the present number of threads
    # Measured tokens per second on an idle machine, by number of threads.
    speeds: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Claims:
    """Cores and time that an instance cannot have."""

    others_cores: float  # mean
    cores: int  # whole cores that other programs take
    instances: int  # our instances that compute at the same time, including this one

    def threads(self, inputs: ThreadsInputs) -> int:
        machine, wanted = inputs.machine, _threads_alone(inputs)
        # Other programs first get the cores that we do not decode on.
        free = machine.physical_cores + machine.quota_spare_cores - self.cores
        return max(1, (min(wanted, free) if self.cores else wanted) // self.instances)


def decide_threads(inputs: ThreadsInputs) -> Setting:
    """Decide the number of threads; keep the current one while there is too little evidence."""
    now, lately, count = _claims_now(inputs), _claims_lately(inputs), inputs.current
    claims = lately or now
    if now and now.threads(inputs) < count:
        count, claims = now.threads(inputs), now
    elif lately and lately.threads(inputs) > count:
        count = lately.threads(inputs)
    return Setting(count, ORIGIN, _reason(inputs, count, claims))


def _claims_now(inputs: ThreadsInputs) -> _Claims | None:
    """Return the claims in which all of the last samples agree."""
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
    """Return the largest claims over any of the spans of the last minutes."""
    if not last_samples(inputs.samples, _SLOW_S):
        return None
    spans = [last_samples(inputs.samples, span_s) for span_s in (_QUICK_S, _SLOW_S, _LONGEST_S)]
    # Until the longest span has samples, all samples count.
    others = max(mean_others_cores(span or inputs.samples) for span in spans)
    # Without evidence from busy times: the number of running instances.
    found = [
        mean_sharing(inputs.samples, name)
        for name in inputs.instances
        if sum(sample.load.span_s for sample in busy_samples(inputs.samples, name)) >= _EVIDENCE_S
    ]
    sharing = max(found, default=float(max(1, len(inputs.samples[-1].busy))))
    return _Claims(others, _round_cores(others, _LEAVES_CORES), _round_cores(sharing, _LEAVES_TIME))


def _round_cores(amount: float, least: float) -> int:
    """Round up if the fraction is at least `least`, otherwise down."""
    return math.floor(amount + 1 - least)


def _threads_alone(inputs: ThreadsInputs) -> int:
    """Return the threads of an instance that is alone on the machine."""
    return fastest_count(inputs.speeds, inputs.machine.decode_cores)


def _reason(inputs: ThreadsInputs, count: int, claims: _Claims | None) -> str:
    machine, found = inputs.machine, [*_texts(claims)]
    kind = machine.decode_core_kind
    if count < machine.decode_cores:
        if inputs.speeds and count == _threads_alone(inputs):
            found = ["measured fastest"]
        why = " and ".join(found) or "the machine was not observed for long enough to change it"
        return f"{count} of {count_of(machine.decode_cores, kind)}: {why}"
    why = " and ".join(found) or "the machine is idle otherwise"
    return f"{count_of(machine.decode_cores, kind)}, {why}"


def _texts(claims: _Claims | None) -> Iterable[str]:
    if claims and claims.others_cores >= _LEAVES_CORES:
        yield f"other programs take {claims.others_cores:.1f} cores"
    if claims and claims.instances > 1:
        yield f"{claims.instances} instances compute at the same time"


THREADS = "threads"


# The pid of an engine, the place of its replica (a successor has that of its predecessor), and its
# number of decode threads.
EngineProcess = tuple[int, str, int]


def engine_processes(fleet: Fleet) -> Iterator[EngineProcess]:
    for replica in fleet.all_replicas():
        if pid := replica.instance.snapshot().pid:
            threads = threads_of(replica.plan) if replica.plan else None
            yield pid, str(replica.place), threads or 1


def threads_of(plan: Plan) -> int | None:
    """Return the decode threads of a plan; None if the engine decides."""
    found = plan.memory_inputs.chosen.get(THREADS)
    return found if isinstance(found, int) and found > 0 else None


def measured_speeds(fleet: Fleet, plan: Plan) -> Mapping[int, float]:
    """Read decode speeds by threads; none until all were measured."""
    if plan.untried_threads is not None:
        return {}
    return known_speeds(fleet.planner.measurements(plan.gguf.path, plan.engine).read(), "decode")


# The kernel counts hundredths of a second, so a shorter time says little.
_SAMPLE_MIN_S: Final = 4.0
# After this time a model that always has requests is changed although they run; they complete on
# the old instance. Too many threads cost more than half of the speed, too few cost less.
_PATIENCE_FEWER_S: Final = 15.0
_PATIENCE_MORE_S: Final = 120.0


@attrs.define(eq=False, slots=False)
class ThreadDecider:
    """Decides the threads of all models whose `threads` are auto and that use no device.

    `processes` returns all running engines, `speeds` the measured speeds of a plan's model. While a
    command measures its own engines (`is_measuring`), nothing is sampled: their load does not last,
    and a replacement would disturb the measurement.
    """

    _processes: Callable[[], Iterable[EngineProcess]]
    _read_speeds: Callable[[Plan], Mapping[int, float]] = attrs.field(alias="speeds")
    _is_measuring: Callable[[], bool] = attrs.field(default=lambda: False, kw_only=True)
    _read: Callable[[Collection[int]], ProcessorReading] = attrs.field(
        default=read_this_processor, kw_only=True
    )
    _read_machine: Callable[[], Machine] = attrs.field(default=machine.read, kw_only=True)
    _before: ProcessorReading | None = attrs.field(default=None, init=False)
    # The wanted number of threads of each model, and since when.
    _wanted: dict[str, tuple[int, float]] = attrs.field(factory=dict, init=False)
    _speeds: dict[str, tuple[Plan, Mapping[int, float]]] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._samples: deque[LoadSample] = deque(maxlen=int(HISTORY_S / _SAMPLE_MIN_S))

    @classmethod
    def of_fleet(cls, fleet: Fleet, directories: Directories) -> ThreadDecider:
        is_measuring = partial(is_in_use, directories)
        processes = partial(engine_processes, fleet)
        return cls(processes, partial(measured_speeds, fleet), is_measuring=is_measuring)

    def sample(self, models: Sequence[ModelView]) -> None:
        """Read the counters, if a model is loaded."""
        names = {model.name for model in models}
        self._wanted = {name: wanted for name, wanted in self._wanted.items() if name in names}
        self._speeds = {name: speed for name, speed in self._speeds.items() if name in names}
        if not models or self._is_measuring():
            self._before = None
        elif self._before is None or models[0].at_s - self._before.at_s >= _SAMPLE_MIN_S:
            processes = [*self._processes()]
            before = self._before
            self._before = self._read([os.getpid(), *(pid for pid, _, _ in processes)])
            if before:
                load = processor_load(before, self._before)
                self._samples.append(LoadSample(load, _busy(processes, load.own_cores)))

    def changes(self, model: ModelView) -> Sequence[Change]:
        current = threads_of(model.plan)
        if current is None or not _may_change(model):
            return ()
        numbers = range(len(model.instances))
        setting = decide_threads(
            ThreadsInputs(
                machine=self._read_machine(),
                samples=self._samples,
                instances=[str(ReplicaId(model.name, number)) for number in numbers],
                current=current,
                speeds=self._speeds_of(model),
            )
        )
        count = int(setting.value)
        if count == current:
            self._wanted.pop(model.name, None)
            return ()
        is_fewer = count < current
        wanted, since_s = self._wanted.get(model.name, (None, model.at_s))
        if wanted != count:
            since_s = model.at_s
            self._wanted[model.name] = count, since_s
        patience_s = _PATIENCE_FEWER_S if is_fewer else _PATIENCE_MORE_S
        is_urgent = model.at_s - since_s >= patience_s
        to = None if count == threads_of(model.base) else setting
        return (Change(THREADS, to, setting.reason, is_urgent=is_urgent),)

    def _speeds_of(self, model: ModelView) -> Mapping[int, float]:
        """Return the measured speeds, read once per run."""
        known = self._speeds.get(model.name)
        if known is None or known[0] is not model.plan:
            known = self._speeds[model.name] = model.plan, self._read_speeds(model.base)
        return known[1]


def _busy(
    processes: Iterable[EngineProcess], own_cores: Mapping[int, float]
) -> Mapping[str, float]:
    """Return the share of the time in which the threads of each place computed."""
    busy: dict[str, float] = {}
    for pid, place, threads in processes:
        share = min(1.0, own_cores.get(pid, 0) / threads)
        busy[place] = max(share, busy.get(place, 0))
    return busy


def _may_change(model: ModelView) -> bool:
    """Return whether the threads are not set and decode, and no trial compares the model."""
    is_here = not (model.plan.engine.devices or model.plan.workers)
    decodes = model.plan.embedding is None and is_here
    return decodes and THREADS in model.base.derived and model.settings.trial is None
