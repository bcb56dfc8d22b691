"""Connects the calibrator of thread counts to one replica."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Protocol

from proxy.router.instances import Activity
from supervisor.calibration.calibrator import ThreadCalibrator
from supervisor.events import Emit
from supervisor.fleet.model import Replica
from supervisor.host.processor_load import ProcessorReading, read_this_processor
from supervisor.instance.states import STATES, State

Replicas = Callable[[], Iterable[Replica]]


class InstanceActivity(Protocol):
    def activity(self, name: str, /) -> Activity: ...


def calibrator(
    replica: Replica, replicas: Replicas, traffic: InstanceActivity, emit: Emit
) -> ThreadCalibrator:
    """Make the calibrator of a replica, one of `replicas`."""
    return ThreadCalibrator(
        plan=lambda: replica.plan,
        plan_again=lambda: replica.planner.plan_at(replica.place),
        store=lambda plan: replica.planner.measurements(plan.gguf.path, plan.engine),
        is_alone=lambda: all(_rests(one, traffic) for one in replicas() if one is not replica),
        read=lambda: _read_processor(replicas()),
        emit=functools.partial(emit, instance=replica.name, model=replica.place.model),
    )


def _rests(replica: Replica, traffic: InstanceActivity) -> bool:
    """Whether an instance neither computes nor loads."""
    state = replica.instance.snapshot().state
    is_idle = state is State.READY and not traffic.activity(replica.name).in_flight
    return is_idle or not STATES[state].process


def _read_processor(replicas: Iterable[Replica]) -> ProcessorReading:
    engines = (one.instance.snapshot().pid for one in replicas)
    return read_this_processor([os.getpid(), *filter(None, engines)])
