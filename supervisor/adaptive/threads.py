"""How many threads decode, by what the machine has to give. Pure.

Threads of one operation wait for each other after each, so one that waits for its core delays all:
on 2 cores with one more busy program, 2 threads of SmolLM2 made 37 tokens/s and 1 made 82; alone
they made 139 and 91 (build 10434). So threads take all performance cores that nobody else uses.

Every change replaces an instance. Therefore a load must last before the threads give way to it, and
its absence must last far longer before they come back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supervisor.flags.setting import Setting
from supervisor.flags.thread_speeds import fastest
from supervisor.host.machine import Machine
from supervisor.host.processor_load import ProcessorLoad

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
        machine, wanted = inputs.machine, _wanted(inputs)
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
    samples = _last(inputs.samples, _QUICK_S)
    if not samples:
        return None
    lasts = min(one.others_cores or 0.0 for one in samples) >= _LEAVES_CORES
    sharing = min(_sharing([one], inputs.instances) for one in samples)
    others = _mean(samples) if lasts else 0.0
    return _Claims(others, _whole(others, _TAKES_CORES), _whole(sharing, _TAKES_TIME))


def _claims_lately(inputs: ThreadsInputs) -> _Claims | None:
    """Claims of the last minutes, as large as over any of the spans."""
    if not _last(inputs.samples, _SLOW_S):
        return None
    spans = [_last(inputs.samples, span_s) for span_s in (_QUICK_S, _SLOW_S, _LONGEST_S)]
    # Until there are samples of the longest span, those that there are count.
    others = max(_mean(span or inputs.samples) for span in spans)
    sharing = _sharing(inputs.samples, inputs.instances)
    return _Claims(others, _whole(others, _LEAVES_CORES), _whole(sharing, _LEAVES_TIME))


def _whole(amount: float, least: float) -> int:
    """Round up from `least` of the last one on."""
    return math.floor(amount + 1 - least)


def _last(samples: Sequence[LoadSample], span_s: float) -> list[LoadSample]:
    """The last samples with known load that cover a span; none if there are too few."""
    if not samples:
        return []
    since_s = samples[-1].load.at_s - span_s / _TOLERANCE
    found = [one for one in samples if one.load.at_s > since_s and one.others_cores is not None]
    covered_s, count = 0.0, 0
    for one in reversed(found):
        if covered_s >= span_s * _TOLERANCE:
            break
        covered_s, count = covered_s + one.load.span_s, count + 1
    return found[len(found) - count :] if covered_s >= span_s * _TOLERANCE else []


def _mean(samples: Iterable[LoadSample]) -> float:
    known = [(one.others_cores, one.load.span_s) for one in samples]
    taken = [(cores * span_s, span_s) for cores, span_s in known if cores is not None]
    return sum(cores_s for cores_s, _ in taken) / (sum(span_s for _, span_s in taken) or 1)


def _sharing(samples: Sequence[LoadSample], instances: Collection[str]) -> float:
    """The mean number of instances that compute while one of these does, at least 1."""
    found = [_computing(samples, name) for name in instances]
    return max(found, default=1.0)


def _computing(samples: Sequence[LoadSample], name: str) -> float:
    own = [one for one in samples if one.busy.get(name, 0) >= _BUSY]
    return 1 + sum(sum(_overlaps(one, name)) for one in own) / max(1, len(own))


def _overlaps(sample: LoadSample, name: str) -> Iterable[float]:
    """For each other instance, the share of the time in which it wants to compute as well.

    Threads that wait for a core do not compute, so what they took is too little to go by then.
    """
    waits = (sample.load.pressure or 0) >= _PRESSURE
    for other, busy in sample.busy.items():
        if other != name and busy >= _BUSY:
            yield 1.0 if waits else min(1.0, busy)


def _wanted(inputs: ThreadsInputs) -> int:
    """The threads of an instance that has the machine to itself."""
    return fastest(inputs.speeds, inputs.machine.decode_cores)


def _reason(inputs: ThreadsInputs, count: int, claims: _Claims | None) -> str:
    machine, found = inputs.machine, [*_texts(claims)]
    kind = machine.decode_core_kind
    if count < machine.decode_cores:
        if inputs.speeds and count == _wanted(inputs):
            found = ["measured fastest"]
        why = " and ".join(found) or "the machine was not observed for long enough to change it"
        return f"{count} of {_counted(machine.decode_cores, kind)}: {why}"
    why = " and ".join(found) or "the machine is idle otherwise"
    return f"{_counted(machine.decode_cores, kind)}, {why}"


def _texts(claims: _Claims | None) -> Iterable[str]:
    if claims and claims.others_cores >= _LEAVES_CORES:
        yield f"other programs take {claims.others_cores:.1f} cores"
    if claims and claims.instances > 1:
        yield f"{claims.instances} instances compute at the same time"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
