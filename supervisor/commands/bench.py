"""`corral bench`: measure a model under several profiles, on engines of its own."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from supervisor.bench import preconditions, variants
from supervisor.bench.job_result import data, result_of
from supervisor.bench.limits import RoundLimits
from supervisor.bench.measurements import Measurements
from supervisor.bench.preconditions import MachineFacts
from supervisor.bench.result import BenchResult
from supervisor.bench.runner import BenchJob, measure
from supervisor.bench.table import table
from supervisor.bench.workloads import choice
from supervisor.commands.machine_facts import machine_facts
from supervisor.commands.targets import choose
from supervisor.errors import Interrupted
from supervisor.host.paths import directories
from supervisor.output import CommandResult, ProgressMeter

_EXIT_INTERRUPTED: Final = 130
_SEED_BITS: Final = 31


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of the command line.

    Attributes:
        profiles: To compare, the first with each other one; none means the default ones.
        workloads: None means all that suit the model.
        force: Measure although the machine is not free.
    """

    profiles: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    repeats: int | None = None
    minutes: float | None = None
    seed: int | None = None
    force: bool = False


def bench(word: str, config: Path | None, options: BenchOptions) -> CommandResult:
    """Measure, and show what was measured, also after Ctrl-C."""
    where = directories()
    targets = choose([word], config, where)
    settings, (model,) = targets.loaded.settings, targets.names
    specs = variants.choose(settings, where, model, options.profiles)
    job = BenchJob(
        model=model,
        specs=specs,
        workloads=choice.choose(options.workloads, model, specs[0].plan, where),
        limits=RoundLimits.of(options.repeats, options.minutes),
        seed=secrets.randbits(_SEED_BITS) if options.seed is None else options.seed,
        directories=where,
    )
    facts = machine_facts(settings, specs[0].plan, where)
    if not options.force:
        preconditions.check(facts, specs)
    return _measure(job, facts)


def _measure(job: BenchJob, facts: MachineFacts) -> CommandResult:
    found = Measurements(spec.name for spec in job.specs)
    began_at = datetime.now(UTC)
    is_interrupted = False
    try:
        asyncio.run(measure(job, found, ProgressMeter()))
    except KeyboardInterrupt as interrupt:
        if not found.has_values:
            raise Interrupted("stopped before anything was measured") from interrupt
        is_interrupted = True
    notes = (
        *(f"measured although {one}" for one in preconditions.obstacles(facts, job.specs)),
        *preconditions.notes(facts),
        *(note for spec in job.specs for note in spec.plan.warnings),
        *found.notes,
        *([_stopped(job, found)] if is_interrupted else []),
    )
    result = result_of(job, found, began_at, notes, is_interrupted=is_interrupted)
    return _shown(result)


def _stopped(job: BenchJob, found: Measurements) -> str:
    planned = job.limits.planned
    of = f" of {planned}" if planned else ""
    return f"stopped after {found.complete_rounds}{of} rounds; the figures are of what was measured"


def _shown(result: BenchResult) -> CommandResult:
    failed = tuple(
        f"{one.name} was given up: {one.failure}" for one in result.variants if one.failure
    )
    exit_code = _EXIT_INTERRUPTED if result.is_interrupted else 1 if failed else 0
    notes = (*failed, *result.notes)
    return CommandResult(data(result), _text(result), notes, exit_code)


def _text(result: BenchResult) -> str:
    lines = [
        f"{result.model} ({result.model_file}) on {result.engine}",
        (
            f"{result.machine.processor}, {result.machine.physical_cores} cores; "
            f"{result.rounds} rounds, seed {result.seed}"
        ),
        *(f"{one.name}: {shlex.join(one.argv)}" for one in result.variants),
        "",
        table(result),
    ]
    return "\n".join(lines)
