"""Implements `corral bench`: measures a model under several profiles, on engines of its own."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from supervisor.bench import standard_workloads, variants
from supervisor.bench.figures import ROUND_FIGURES, BenchMachine, BenchResult, findings, table
from supervisor.bench.html_report import shell, write_report
from supervisor.bench.own_engine import measure_threads
from supervisor.bench.runner import Bench, RoundLimits
from supervisor.bench.variants import LoadedModel, MachineFacts
from supervisor.cli.options import names_of
from supervisor.cli.requests import ask_records
from supervisor.cli.targets import choose
from supervisor.daemon.control_messages import ModelStatus
from supervisor.daemon.model_commands import running_status
from supervisor.errors import AccessDenied, Interrupted
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import CommandResult, ProgressMeter
from supervisor.plan.fit import capacity
from supervisor.plan.plan import Plan
from supervisor.records.requests import RecordedRequest
from supervisor.settings.schema import Settings
from supervisor.system import machine
from supervisor.system.machine import cpu_name
from supervisor.system.paths import directories
from supervisor.system.processor_load import busy_programs

_WATCHED_S: Final = 0.5


def machine_facts(settings: Settings, plan: Plan) -> MachineFacts:
    """Read the machine, its busy programs (for 0.5 s) and the daemon's loaded models."""
    here, status = machine.read(), running_status()
    return MachineFacts(
        capacity=capacity(here, plan.engine.devices, settings.supervisor.memory_budget),
        available_bytes=here.memory_available_bytes,
        logical_cores=here.logical_cores,
        programs=busy_programs(_WATCHED_S),
        loaded=tuple(
            found for model in (status.models if status else ()) if (found := _loaded_model(model))
        ),
    )


def _loaded_model(model: ModelStatus) -> LoadedModel | None:
    pids = [instance.pid for instance in model.instances if instance.pid is not None]
    if not pids:
        return None
    memory = [size for instance in model.instances if (size := instance.memory_bytes) is not None]
    busy = sum(instance.slots_busy for instance in model.instances)
    return LoadedModel(model.name, sum(memory) if memory else None, busy, tuple(pids))


def data(result: BenchResult) -> dict[str, object]:
    """Return the result for --json, with all raw values and comparisons with the first variant."""
    return asdict(result) | {
        "began_at": result.began_at.isoformat(timespec="seconds"),
        "rounds": result.rounds,
        "variants": [
            asdict(variant) | {"rounds": [values or None for values in variant.rounds]}
            for variant in result.variants
        ],
        "figures": [
            asdict(figure)
            | {"workload": figure.workload, "is_higher_better": figure.is_higher_better}
            for figure in result.figures
        ],
        "comparisons": [
            {"figure": finding.figure.name, "variant": variant.name, **variant.comparison.data()}
            for finding in findings(result)
            for variant in finding.variants
            if variant.comparison
        ],
    }


def result_of(
    job: Bench, began_at: datetime, notes: Sequence[str], *, is_interrupted: bool
) -> BenchResult:
    plan, measured, here = job.specs[0].plan, tuple(job.variants.values()), machine.read()
    figures = (*(figure for load in job.workloads for figure in load.figures), *ROUND_FIGURES)
    return BenchResult(
        model=job.model,
        model_file=plan.gguf.path.name,
        engine=plan.engine.version,
        machine=BenchMachine(
            processor=cpu_name(),
            physical_cores=here.physical_cores,
            logical_cores=here.logical_cores,
            memory_bytes=here.memory_bytes,
            devices=tuple(device.description for device in plan.engine.devices),
            system=f"{platform.system()} {platform.release()}",
        ),
        began_at=began_at,
        duration_s=(datetime.now(UTC) - began_at).total_seconds(),
        seed=job.seed,
        workloads=tuple(workload.name for workload in job.workloads),
        rounds_planned=job.limits.planned_rounds,
        is_interrupted=is_interrupted,
        figures=tuple(
            figure for figure in figures if any(variant.values(figure.name) for variant in measured)
        ),
        variants=measured,
        notes=tuple(notes),
    )


_EXIT_INTERRUPTED: Final = 130
_SEED_BITS: Final = 31


def bench(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: str,
    profiles: str,
    workload: str,
    repeats: int | None,
    minutes: float | None,
    seed: int | None,
    force: bool,  # noqa: FBT001 (as above)
    report: Path | None,
    config: Path | None,
) -> CommandResult:
    """Measure and show the figures, also after Ctrl-C."""
    where = directories()
    targets = choose([model], config, where)
    settings, (name,) = targets.loaded.settings, targets.names
    specs = variants.choose(settings, where, name, names_of(profiles))
    recorded = [RecordedRequest(*row) for row in ask_records("sizes", name, ())]
    workloads = standard_workloads.choose(names_of(workload), name, specs[0].plan, recorded)
    if report and (report.is_dir() or not os.access(report.absolute().parent, os.W_OK)):
        raise AccessDenied(
            f"cannot write the report {report}",
            hint="name a file in a directory that exists and is yours to write",
        )
    facts = machine_facts(settings, specs[0].plan)
    if not force:
        variants.check(facts, specs)
    measure_threads(LaunchPlanner(settings, where), name, where)
    specs = variants.choose(settings, where, name, names_of(profiles))  # with measured threads
    job = Bench(
        model=name,
        specs=specs,
        workloads=workloads,
        limits=RoundLimits(repeats, minutes),
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        directories=where,
        meter=ProgressMeter(),
        recorded=recorded,
    )
    result = _measure(job, facts)
    notes = [
        f"{variant.name} was given up: {variant.failure}"
        for variant in result.variants
        if variant.failure
    ]
    exit_code = 1 if notes else 0
    notes += result.notes
    if report:
        given: dict[str, object] = {
            "--seed": result.seed,
            "--profiles": profiles,
            "--workload": workload,
        }
        given |= {"--repeats": repeats, "--minutes": minutes and f"{minutes:g}"}
        given |= {"--config": config and config.absolute()}
        options = [word for pair in given.items() if pair[1] not in {None, ""} for word in pair]
        try:
            write_report(result, report, shell(map(str, ["corral", "bench", model, *options])))
            notes.append(f"the report is in {report}")
        except OSError as error:
            notes.append(f"the report {report} was not written: {error.strerror}")
            exit_code = 1
    exit_code = _EXIT_INTERRUPTED if result.is_interrupted else exit_code
    return CommandResult(data(result), _text(result), tuple(notes), exit_code)


def _measure(job: Bench, facts: MachineFacts) -> BenchResult:
    began_at = datetime.now(UTC)
    is_interrupted = False
    try:
        asyncio.run(job.measure())
    except KeyboardInterrupt as interrupt:
        if not job.has_values:
            raise Interrupted("stopped before anything was measured") from interrupt
        is_interrupted = True
    planned = f" of {job.limits.planned_rounds}" if job.limits.planned_rounds else ""
    stopped = f"stopped after {job.complete_rounds}{planned} rounds; the figures are of those"
    notes = (
        *(f"measured although {obstacle}" for obstacle in variants.obstacles(facts, job.specs)),
        *variants.notes(facts),
        *(note for spec in job.specs for note in spec.plan.warnings),
        *job.notes,
        *filter(None, [variants.note_on_load(job.others_cores, facts.logical_cores)]),
        *([stopped] if is_interrupted else []),
    )
    return result_of(job, began_at, notes, is_interrupted=is_interrupted)


def _text(result: BenchResult) -> str:
    rounds = "1 round" if result.rounds == 1 else f"{result.rounds} rounds"
    here = f"{result.machine.processor}, {result.machine.physical_cores} cores"
    title = f"{result.model} ({result.model_file}) on {result.engine}"
    return "\n".join([title, f"{here}; {rounds}, seed {result.seed}", "", table(result)])
