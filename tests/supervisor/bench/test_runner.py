"""Variants measured with the real engine."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
from support.bench_result import result as made_up

from supervisor.bench.runner import BenchJob, Measurements, RoundLimits, measure, order
from supervisor.bench.standard_workloads import WORKLOADS
from supervisor.bench.variants import VariantSpec, choose
from supervisor.bench.workload import MeasuredEngine, Outcome, Workload, WorkloadFailed
from supervisor.cli.bench import data, result_of
from supervisor.engine.client import EngineUnreachable
from supervisor.errors import StartFailed
from supervisor.output import ProgressMeter
from supervisor.plan.plan import PlanLine
from supervisor.settings.schema import Settings
from supervisor.system.energy import Counter, EnergyReading
from supervisor.system.paths import Directories

GENERATION = WORKLOADS["generation"]


@pytest.fixture
def job(tiny_model: Path, runtime: Path) -> BenchJob:
    where = Directories(*[runtime] * 5)
    specs = choose(Settings(models={"tiny": {"path": tiny_model}}), where, "tiny", [])
    return BenchJob("tiny", specs, (GENERATION,), RoundLimits.from_options(2, None), 1, where)


def readings(*joules: float) -> Callable[[], EnergyReading]:
    ahead = iter(joules)
    return lambda: EnergyReading({"package-0": Counter(next(ahead), 100)}, None)


def broken(spec: VariantSpec) -> VariantSpec:
    lines = (*spec.plan.lines, PlanLine("--no-such-flag", None, "a test", ""))
    return replace(spec, name="broken", plan=replace(spec.plan, lines=lines))


async def measured(job: BenchJob) -> Measurements:
    found = Measurements(spec.name for spec in job.specs)
    await measure(job, found, ProgressMeter(io.StringIO()))
    return found


async def test_each_round_has_every_figure_of_every_variant(job: BenchJob) -> None:
    found = await measured(job)
    assert found.complete_rounds == 2
    for spec in job.specs:
        for values in found.rounds(spec.name):
            assert values
            assert {"ready_s", "peak_memory", "generation.decode_rate"} <= set(values)


async def test_a_variant_that_fails_to_start_has_its_cause_and_the_others_go_on(
    job: BenchJob,
) -> None:
    job = replace(job, specs=(broken(job.specs[0]), job.specs[1]))
    found = await measured(job)
    assert "no-such-flag" in (found.failure("broken") or "")
    assert len([values for values in found.rounds("base") if values]) == 2
    assert found.rounds("broken") == (None, None)


async def test_without_a_variant_that_runs_it_fails(job: BenchJob) -> None:
    with pytest.raises(StartFailed, match="no-such-flag"):
        await measured(replace(job, specs=(broken(job.specs[0]),)))


async def test_a_rejected_workload_is_noted_and_the_next_one_runs(job: BenchJob) -> None:
    async def rejected(_engine: MeasuredEngine, _rng: Random) -> Outcome:
        raise WorkloadFailed("status 400")

    job = replace(
        job,
        specs=job.specs[:1],
        workloads=(Workload("odd", "", (), rejected), GENERATION),
        limits=RoundLimits.from_options(1, None),
    )
    found = await measured(job)
    assert found.notes == ("plain, odd: status 400",)
    assert "generation.decode_rate" in (found.rounds("plain")[0] or {})


async def test_an_engine_that_stops_answering_is_given_up(job: BenchJob) -> None:
    async def silent(_engine: MeasuredEngine, _rng: Random) -> Outcome:
        raise EngineUnreachable("GET /x: no response")

    job = replace(job, specs=job.specs[:1], workloads=(Workload("odd", "", (), silent),))
    found = await measured(job)
    assert found.failure("plain") == "GET /x: no response"


async def test_what_was_measured_before_a_cancellation_is_kept(job: BenchJob) -> None:
    reached = asyncio.Event()

    async def waits(_engine: MeasuredEngine, _rng: Random) -> Outcome:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    job = replace(job, specs=job.specs[:1], workloads=(GENERATION, Workload("odd", "", (), waits)))
    found = Measurements(["plain"])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(measure(job, found, ProgressMeter(io.StringIO())))
        await reached.wait()
        task.cancel()
    result = result_of(job, found, datetime.now(UTC), [], is_interrupted=True)
    assert (found.complete_rounds, result.rounds) == (0, 1)
    assert result.variants[0].values("generation.decode_rate")
    assert [figure.name for figure in result.figures][:1] == ["generation.first_token"]
    assert data(result)["is_interrupted"] is True


def test_rounds_have_orders_of_their_own_and_a_seed_repeats_them(job: BenchJob) -> None:
    names = [tuple(spec.name for spec in order(job.specs, 1, number)) for number in range(20)]
    assert set(names) == {("plain", "base"), ("base", "plain")}
    assert names == [
        tuple(spec.name for spec in order(job.specs, 1, number)) for number in range(20)
    ]


async def test_energy_is_that_of_a_thousand_tokens(job: BenchJob) -> None:
    two = Workload("two", "", (), lambda _engine, _rng: _outcome(tokens=2000))
    job = replace(
        job, specs=job.specs[:1], workloads=(two,), limits=RoundLimits.from_options(1, None),
        read_energy=readings(95, 1),
    )  # fmt: skip
    found = await measured(job)
    (values,) = found.rounds("plain")
    assert values
    assert values["energy"] == 3
    assert found.notes == ("energy is that of the processor, for all programs",)


async def test_energy_that_cannot_be_read_is_absent(job: BenchJob) -> None:
    unknown = replace(job, read_energy=lambda: EnergyReading(None, None))
    found = await measured(replace(unknown, limits=RoundLimits.from_options(1, None)))
    assert "energy" not in (found.rounds("plain")[0] or {})


async def _outcome(tokens: int) -> Outcome:
    return Outcome({}, tokens)


def test_comparisons_for_scripts_are_against_the_first_variant() -> None:
    found = data(made_up(1, 1.4))["comparisons"]
    assert isinstance(found, list)
    assert {entry["variant"] for entry in found} == {"base"}
    rate = next(entry for entry in found if entry["figure"] == "concurrent.total_rate")
    assert rate["low"] < 1.4 < rate["high"]
    assert rate["verdict"].startswith("1.4")
