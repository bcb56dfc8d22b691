"""Measures variants in interleaved rounds, each time on a fresh engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Final

from supervisor.bench.figures import ENERGY, PEAK_MEMORY, READY
from supervisor.bench.instance import PrivateInstance, private_instance
from supervisor.bench.limits import RoundLimits
from supervisor.bench.measurements import Measurements
from supervisor.bench.progress import Progress, Step, Timeline, ticking
from supervisor.bench.rehearsal import rehearse
from supervisor.bench.sizes import Measured, Sizes, choose_sizes
from supervisor.bench.variants import VariantSpec
from supervisor.bench.workloads.workload import (
    MeasuredEngine,
    Outcome,
    Workload,
    WorkloadFailed,
)
from supervisor.engine_client.client import EngineUnreachable
from supervisor.errors import CorralError, EngineFailed, StartFailed
from supervisor.host import energy
from supervisor.host.energy import Energy, EnergyReading
from supervisor.host.paths import Directories
from supervisor.host.processor_load import processor_load, read_this_processor
from supervisor.output import ProgressMeter

_START: Final = "start"
# Sizes are chosen for some seconds; an engine that takes this long hangs.
_WORKLOAD_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class BenchJob:
    """What to measure.

    Attributes:
        seed: Of texts and of the order of variants.
        read_energy: Reads the counters of this machine.
    """

    model: str
    specs: tuple[VariantSpec, ...]
    workloads: tuple[Workload, ...]
    limits: RoundLimits
    seed: int
    directories: Directories
    read_energy: Callable[[], EnergyReading] = energy.read


async def measure(job: BenchJob, found: Measurements, meter: ProgressMeter) -> None:
    """Measure into `found` until the rounds are done; cancel it to stop earlier.

    Raises:
        CorralError: No variant runs.
    """
    progress = _progress(job, meter)
    try:
        with ticking(progress.show):
            sizes = await _first_starts(job, found, progress)
            await _rounds(_Run(job, sizes, found, progress))
    finally:
        meter.clear()


def _progress(job: BenchJob, meter: ProgressMeter) -> Progress:
    whats = (_START, *(one.name for one in job.workloads))
    steps = [Step(spec.name, what) for spec in job.specs for what in whats]
    timeline = Timeline(steps, job.limits)
    return Progress(f"bench {job.model}", timeline, job.limits, meter)


async def _first_starts(job: BenchJob, found: Measurements, progress: Progress) -> Sizes:
    """Start each variant once, unmeasured; its files are then in the page cache."""
    able: list[Measured] = []
    errors: list[CorralError] = []
    for spec in job.specs:
        try:
            with progress.step(spec.name, _START):
                able.append(await rehearse(spec, job.directories))
        except (StartFailed, EngineFailed) as error:
            errors.append(error)
            found.give_up(spec.name, _sentence(error))
        except (WorkloadFailed, EngineUnreachable) as error:
            errors.append(StartFailed(f"{spec.name}: {error}", hint="corral plan shows its flags"))
            found.give_up(spec.name, str(error))
    if not able:
        raise errors[0]
    return choose_sizes(able)


@dataclass(frozen=True, slots=True)
class _Run:
    job: BenchJob
    sizes: Sizes
    found: Measurements
    progress: Progress


async def _rounds(run: _Run) -> None:
    longest_s = 0.0
    while run.found.running and run.job.limits.may_begin(
        run.found.complete_rounds, run.progress.elapsed_s, longest_s
    ):
        began_s = time.monotonic()
        run.progress.begin_round()
        run.found.begin_round()
        for spec in order(run.job.specs, run.job.seed, run.found.complete_rounds):
            if spec.name in run.found.running:
                await _measure_one(run, spec)
        run.found.end_round()
        longest_s = max(longest_s, time.monotonic() - began_s)


def order(specs: Sequence[VariantSpec], seed: int, number: int) -> list[VariantSpec]:
    """The order of the variants in a round: another one in each, and the same for one seed."""
    return Random(f"{seed}:{number}").sample(specs, len(specs))  # noqa: S311 (an order)


async def _measure_one(run: _Run, spec: VariantSpec) -> None:
    try:
        async with AsyncExitStack() as stack:
            with run.progress.step(spec.name, _START):
                starting = private_instance(spec.plan, run.job.directories)
                instance = await stack.enter_async_context(starting)
            run.found.add(spec.name, {READY.name: instance.ready_s})
            await _run_workloads(run, spec, instance)
    except (StartFailed, EngineFailed) as error:
        run.found.give_up(spec.name, _sentence(error))
    except EngineUnreachable as error:  # although it still runs
        run.found.give_up(spec.name, str(error))


async def _run_workloads(run: _Run, spec: VariantSpec, instance: PrivateInstance) -> None:
    engine = MeasuredEngine(
        instance.client,
        run.sizes,
        run.job.model,
        run.job.directories,
        names_slots=spec.plan.has_own_slots,
    )
    load_before = read_this_processor((instance.pid, os.getpid()))
    before, tokens = run.job.read_energy(), 0
    for workload in run.job.workloads:
        with run.progress.step(spec.name, workload.name):
            if outcome := await _outcome(run, spec, workload, engine):
                run.found.add(spec.name, outcome.values)
                tokens += outcome.tokens
    _add_energy(run, spec, energy.between(before, run.job.read_energy()), tokens)
    load = processor_load(load_before, read_this_processor((instance.pid, os.getpid())))
    run.found.add_load(load.others_cores)
    if peak := instance.peak_memory_bytes():
        run.found.add(spec.name, {PEAK_MEMORY.name: peak})


def _add_energy(run: _Run, spec: VariantSpec, used: Energy, tokens: int) -> None:
    if used.total_j is None or not tokens:
        return
    run.found.add(spec.name, {ENERGY.name: 1000 * used.total_j / tokens})
    run.found.note(f"energy is that of the {used.covers}, for all programs")


async def _outcome(
    run: _Run, spec: VariantSpec, workload: Workload, engine: MeasuredEngine
) -> Outcome | None:
    """Run a workload; one that the engine rejects is noted, and the others go on."""
    rng = Random(f"{run.job.seed}:{run.found.complete_rounds}:{workload.name}")  # noqa: S311
    try:
        return await _bounded(workload, engine, rng)
    except WorkloadFailed as error:
        run.found.note(f"{spec.name}, {workload.name}: {error}")
        return None


async def _bounded(workload: Workload, engine: MeasuredEngine, rng: Random) -> Outcome:
    try:
        async with asyncio.timeout(_WORKLOAD_TIMEOUT_S):
            return await workload.run(engine, rng)
    except TimeoutError as error:
        raise WorkloadFailed(f"not finished in {_WORKLOAD_TIMEOUT_S:g} s") from error


def _sentence(error: CorralError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message
