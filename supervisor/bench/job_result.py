"""The result of a job, from what was measured."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from supervisor.bench.figures import ROUND_FIGURES, Figure
from supervisor.bench.findings import findings
from supervisor.bench.measurements import Measurements
from supervisor.bench.result import BenchMachine, BenchResult, Variant
from supervisor.bench.runner import BenchJob
from supervisor.flags.plan import Plan
from supervisor.host import machine
from supervisor.host.cpu_name import cpu_name


def data(result: BenchResult) -> dict[str, object]:
    """The result for --json, with all raw values; comparisons are against the first variant."""
    return asdict(result) | {
        "began_at": result.began_at.isoformat(timespec="seconds"),
        "rounds": result.rounds,
        "figures": [
            asdict(one) | {"workload": one.workload, "is_higher_better": one.is_higher_better}
            for one in result.figures
        ],
        "comparisons": [
            {"figure": one.figure.name, "variant": variant.name, **variant.comparison.data()}
            for one in findings(result)
            for variant in one.variants
            if variant.comparison
        ],
    }


def result_of(
    job: BenchJob,
    found: Measurements,
    began_at: datetime,
    notes: Sequence[str],
    *,
    is_interrupted: bool,
) -> BenchResult:
    plan = job.specs[0].plan
    measured = tuple(
        Variant(
            spec.name, spec.profile, spec.argv, found.rounds(spec.name), found.failure(spec.name)
        )
        for spec in job.specs
    )
    return BenchResult(
        model=job.model,
        model_file=plan.gguf.path.name,
        engine=plan.engine.version,
        machine=_machine(plan),
        began_at=began_at,
        duration_s=(datetime.now(UTC) - began_at).total_seconds(),
        seed=job.seed,
        workloads=tuple(one.name for one in job.workloads),
        rounds_planned=job.limits.planned,
        is_interrupted=is_interrupted,
        figures=tuple(_figures(job, measured)),
        variants=measured,
        notes=tuple(notes),
    )


def _figures(job: BenchJob, measured: Sequence[Variant]) -> Iterator[Figure]:
    """Those that some variant has."""
    for figure in (*(one for load in job.workloads for one in load.figures), *ROUND_FIGURES):
        if any(variant.values(figure.name) for variant in measured):
            yield figure


def _machine(plan: Plan) -> BenchMachine:
    here = machine.read()
    return BenchMachine(
        processor=cpu_name(),
        physical_cores=here.physical_cores,
        logical_cores=here.logical_cores,
        memory_bytes=here.memory_bytes,
        devices=tuple(one.description for one in plan.engine.devices),
        system=f"{platform.system()} {platform.release()}",
    )
