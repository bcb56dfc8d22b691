"""Measures thread counts as the first starts of a daemon do, for a model that had none yet."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from supervisor.bench.instance import PrivateInstance, private_instance
from supervisor.calibration.calibrator import ThreadCalibrator
from supervisor.errors import EngineFailed, StartFailed
from supervisor.flags.plan import Plan
from supervisor.flags.thread_speeds import COUNTS_MAX
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.paths import Directories
from supervisor.host.processor_load import ProcessorReading, read_this_processor
from supervisor.output import ProgressMeter


def measure_threads(planner: LaunchPlanner, model: str, directories: Directories) -> None:
    """Measure until the next plan of a model has what a daemon would give it.

    A model that does not run is left as it is; its next start reports why.
    """
    plan = planner.plan(model)
    if plan.untried_threads is None:
        return
    meter = ProgressMeter()
    meter.show(model, 0, "measuring how many threads are fastest, once for this model")
    try:
        with suppress(StartFailed, EngineFailed):
            asyncio.run(_measure(planner, plan, directories))
    finally:
        meter.clear()


async def _measure(planner: LaunchPlanner, plan: Plan, directories: Directories) -> None:
    for _ in range(COUNTS_MAX):
        if plan.untried_threads is None:
            return
        async with private_instance(plan, directories) as instance, instance.client() as client:
            if not await _calibrator(planner, plan, instance).needs_restart(client, 1):
                return
        plan = planner.plan(plan.model)


def _calibrator(planner: LaunchPlanner, plan: Plan, instance: PrivateInstance) -> ThreadCalibrator:
    def read() -> ProcessorReading:
        return read_this_processor([os.getpid(), instance.pid])

    return ThreadCalibrator(
        plan=lambda: plan,
        plan_again=lambda: planner.plan(plan.model),
        store=lambda _: planner.measurements(plan.gguf.path, plan.engine),
        is_alone=lambda: True,
        read=read,
        emit=lambda *_, **__: None,
    )
