"""`corral bench`: measure a model under several profiles, on engines of its own."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from supervisor.bench import preconditions, variants
from supervisor.bench.calibration import measure_threads
from supervisor.bench.job_result import data, result_of
from supervisor.bench.limits import RoundLimits
from supervisor.bench.measurements import Measurements
from supervisor.bench.preconditions import MachineFacts
from supervisor.bench.report.command_line import shell
from supervisor.bench.report.page import write_report
from supervisor.bench.result import BenchResult
from supervisor.bench.runner import BenchJob, measure
from supervisor.bench.table import table
from supervisor.bench.workloads import choice
from supervisor.commands.machine_facts import machine_facts
from supervisor.commands.targets import choose
from supervisor.errors import AccessDenied, Interrupted
from supervisor.fleet.planner import LaunchPlanner
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
        report: Where to write an HTML report.
    """

    profiles: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    repeats: int | None = None
    minutes: float | None = None
    seed: int | None = None
    force: bool = False
    report: Path | None = None


def bench(word: str, config: Path | None, options: BenchOptions) -> CommandResult:
    """Measure, and show what was measured, also after Ctrl-C."""
    where = directories()
    targets = choose([word], config, where)
    settings, (model,) = targets.loaded.settings, targets.names
    specs = variants.choose(settings, where, model, options.profiles)
    workloads = choice.choose(options.workloads, model, specs[0].plan, where)
    _check_report(options.report)
    facts = machine_facts(settings, specs[0].plan, where)
    if not options.force:
        preconditions.check(facts, specs)
    measure_threads(LaunchPlanner(settings, where), model, where)
    specs = variants.choose(settings, where, model, options.profiles)  # with what was measured
    job = BenchJob(
        model=model,
        specs=specs,
        workloads=workloads,
        limits=RoundLimits.of(options.repeats, options.minutes),
        seed=secrets.randbits(_SEED_BITS) if options.seed is None else options.seed,
        directories=where,
    )
    result = _measure(job, facts)
    repeat = _repeat(result, word, config, options)
    return _shown(result, *_write_report(result, repeat, options.report))


def _measure(job: BenchJob, facts: MachineFacts) -> BenchResult:
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
        *filter(None, [preconditions.note_on_load(found.others_cores, facts.logical_cores)]),
        *([_stopped(job, found)] if is_interrupted else []),
    )
    return result_of(job, found, began_at, notes, is_interrupted=is_interrupted)


def _stopped(job: BenchJob, found: Measurements) -> str:
    planned = job.limits.planned
    of = f" of {planned}" if planned else ""
    return f"stopped after {found.complete_rounds}{of} rounds; the figures are of what was measured"


def _check_report(path: Path | None) -> None:
    """Refuse a report that cannot be written before anything is measured."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise AccessDenied(
            f"cannot write the report {path}",
            hint="name a file in a directory that exists and is yours to write",
        )


def _write_report(result: BenchResult, repeat: str, path: Path | None) -> tuple[str, bool]:
    """Return a sentence on the report, and whether it failed; the result is shown in any case."""
    if path is None:
        return "", False
    try:
        write_report(result, path, repeat)
    except OSError as error:
        return f"the report {path} was not written: {error.strerror}", True
    return f"the report is in {path}", False


def _repeat(result: BenchResult, word: str, config: Path | None, options: BenchOptions) -> str:
    """The command that measures the same again, with the same texts and orders."""
    words = ["corral", "bench", word, "--seed", str(result.seed)]
    words += ["--profiles", ",".join(options.profiles)] if options.profiles else []
    words += ["--workload", ",".join(options.workloads)] if options.workloads else []
    words += ["--repeats", str(options.repeats)] if options.repeats else []
    words += ["--minutes", f"{options.minutes:g}"] if options.minutes else []
    words += ["--config", str(config.absolute())] if config else []
    return shell(words)


def _shown(result: BenchResult, report: str, is_report_missing: bool) -> CommandResult:  # noqa: FBT001
    failed = tuple(
        f"{one.name} was given up: {one.failure}" for one in result.variants if one.failure
    )
    exit_code = 1 if failed or is_report_missing else 0
    notes = (*failed, *result.notes, *([report] if report else []))
    return CommandResult(
        data(result),
        _text(result),
        notes,
        _EXIT_INTERRUPTED if result.is_interrupted else exit_code,
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _text(result: BenchResult) -> str:
    lines = [
        f"{result.model} ({result.model_file}) on {result.engine}",
        (
            f"{result.machine.processor}, {result.machine.physical_cores} cores; "
            f"{_counted(result.rounds, 'round')}, seed {result.seed}"
        ),
        "",
        table(result),
    ]
    return "\n".join(lines)
