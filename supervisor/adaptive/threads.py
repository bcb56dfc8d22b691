"""How many threads decode, by what the machine has to give. Pure.

Threads of one operation wait for each other after each, so one that waits for its core delays all:
on 2 cores with one more busy program, 2 threads of SmolLM2 made 37 tokens/s and 1 made 82; alone
they made 139 and 91 (build 10434). So threads take all performance cores that are free.

Every change replaces an instance. Therefore a load must last before the threads give way to it, and
its absence must last far longer before they come back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supervisor.adaptive.load_samples import (
    LoadSample,
    last_samples,
    mean_others_cores,
    mean_sharing,
    while_computing,
)
from supervisor.flags.setting import Setting
from supervisor.flags.thread_speeds import fastest
from supervisor.host.machine import Machine

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
    samples = last_samples(inputs.samples, _QUICK_S)
    if not samples:
        return None
    lasts = min(one.others_cores or 0.0 for one in samples) >= _LEAVES_CORES
    sharing = min(max(mean_sharing([one], name) for name in inputs.instances) for one in samples)
    others = mean_others_cores(samples) if lasts else 0.0
    return _Claims(others, _whole(others, _TAKES_CORES), _whole(sharing, _TAKES_TIME))


def _claims_lately(inputs: ThreadsInputs) -> _Claims | None:
    """Claims of the last minutes, as large as over any of the spans."""
    if not last_samples(inputs.samples, _SLOW_S):
        return None
    spans = [last_samples(inputs.samples, span_s) for span_s in (_QUICK_S, _SLOW_S, _LONGEST_S)]
    # Until there are samples of the longest span, those that there are count.
    others = max(mean_others_cores(span or inputs.samples) for span in spans)
    sharing = _sharing_lately(inputs)
    return _Claims(others, _whole(others, _LEAVES_CORES), _whole(sharing, _LEAVES_TIME))


def _whole(amount: float, least: float) -> int:
    """Round up from `least` of the last one on."""
    return math.floor(amount + 1 - least)


def _sharing_lately(inputs: ThreadsInputs) -> float:
    """As `mean_sharing`; all instances that run count while these were hardly used."""
    found = [
        mean_sharing(inputs.samples, name)
        for name in inputs.instances
        if sum(one.load.span_s for one in while_computing(inputs.samples, name)) >= _EVIDENCE_S
    ]
    return max(found, default=float(max(1, len(inputs.samples[-1].busy))))


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
