"""Variants measured with the real engine."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.bench_result import result as made_up

from supervisor.bench.runner import Bench, RoundLimits, order
from supervisor.bench.standard_workloads import WORKLOADS
from supervisor.bench.variants import VariantSpec, choose
from supervisor.bench.workload import MeasuredEngine, Outcome, Workload, WorkloadFailed
from supervisor.cli.bench import data, result_of
from supervisor.engine.client import EngineUnreachable
from supervisor.errors import StartFailed
from supervisor.output import ProgressMeter
from supervisor.plan.plan import PlanLine
from supervisor.settings.schema import Settings
from supervisor.system.energy import EnergyReading
from supervisor.system.paths import Directories

GENERATION = WORKLOADS["generation"]


@pytest.fixture
def job(tiny_model: Path, runtime: Path) -> Bench:
    where = Directories(*[runtime] * 5)
    specs = choose(Settings(models={"tiny": {"path": tiny_model}}), where, "tiny", [])
    return Bench(
        model="tiny",
        specs=specs,
        workloads=(GENERATION,),
        limits=RoundLimits(2, None),
        seed=1,
        directories=where,
        meter=ProgressMeter(io.StringIO()),
    )


def readings(*joules: float) -> Callable[[], EnergyReading]:
    ahead = iter(joules)
    return lambda: ({"package-0": (next(ahead), 100)}, None)


def broken(spec: VariantSpec) -> VariantSpec:
    lines = (*spec.plan.lines, PlanLine("--no-such-flag", None, "a test", ""))
    return replace(spec, name="broken", plan=replace(spec.plan, lines=lines))


def changed(job: Bench, **fields: Any) -> Bench:
    """Return another bench, which has measured nothing."""
    return replace(job, **fields, notes={}, others_cores=[])


async def measured(job: Bench) -> Bench:
    await job.measure()
    return job


async def test_each_round_has_every_figure_of_every_variant(job: Bench) -> None:
    found = await measured(job)
    assert found.complete_rounds == 2
    for spec in job.specs:
        for values in found.variants[spec.name].rounds:
            assert values
            assert {"ready_s", "peak_memory", "generation.decode_rate"} <= set(values)


async def test_a_variant_that_fails_to_start_has_its_cause_and_the_others_go_on(
    job: Bench,
) -> None:
    job = changed(job, specs=(broken(job.specs[0]), job.specs[1]))
    found = await measured(job)
    assert "no-such-flag" in (found.variants["broken"].failure or "")
    assert len([values for values in found.variants["base"].rounds if values]) == 2
    assert found.variants["broken"].rounds == [{}, {}]


async def test_without_a_variant_that_runs_it_fails(job: Bench) -> None:
    with pytest.raises(StartFailed, match="no-such-flag"):
        await measured(changed(job, specs=(broken(job.specs[0]),)))


async def test_a_rejected_workload_is_noted_and_the_next_one_runs(job: Bench) -> None:
    async def rejected(_engine: MeasuredEngine, _rng: Random) -> Outcome:
        raise WorkloadFailed("status 400")

    job = changed(
        job,
        specs=job.specs[:1],
        workloads=(Workload("odd", "", (), rejected), GENERATION),
        limits=RoundLimits(1, None),
    )
    found = await measured(job)
    assert [*found.notes] == ["plain, odd: status 400"]
    assert "generation.decode_rate" in found.variants["plain"].rounds[0]


async def test_an_engine_that_stops_answering_is_given_up(job: Bench) -> None:
    async def silent(_engine: MeasuredEngine, _rng: Random) -> Outcome:
        raise EngineUnreachable("GET /x: no response")

    job = changed(job, specs=job.specs[:1], workloads=(Workload("odd", "", (), silent),))
    found = await measured(job)
    assert found.variants["plain"].failure == "GET /x: no response"


async def test_what_was_measured_before_a_cancellation_is_kept(job: Bench) -> None:
    reached = asyncio.Event()

    async def waits(_engine: MeasuredEngine, _rng: Random) -> Outcome:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    job = changed(job, specs=job.specs[:1], workloads=(GENERATION, Workload("odd", "", (), waits)))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(job.measure())
        await reached.wait()
        task.cancel()
    result = result_of(job, datetime.now(UTC), [], is_interrupted=True)
    assert (job.complete_rounds, result.rounds) == (0, 1)
    assert result.variants[0].values("generation.decode_rate")
    assert [figure.name for figure in result.figures][:1] == ["generation.first_token"]
    assert data(result)["is_interrupted"] is True


def test_rounds_have_different_orders_and_a_seed_repeats_them(job: Bench) -> None:
    names = [tuple(spec.name for spec in order(job.specs, 1, number)) for number in range(20)]
    assert set(names) == {("plain", "base"), ("base", "plain")}
    assert names == [
        tuple(spec.name for spec in order(job.specs, 1, number)) for number in range(20)
    ]


async def test_energy_is_that_of_a_thousand_tokens(job: Bench) -> None:
    two = Workload("two", "", (), lambda _engine, _rng: _outcome(tokens=2000))
    job = changed(
        job, specs=job.specs[:1], workloads=(two,), limits=RoundLimits(1, None),
        read_energy=readings(95, 1),
    )  # fmt: skip
    found = await measured(job)
    (values,) = found.variants["plain"].rounds
    assert values
    assert values["energy"] == 3
    assert [*found.notes] == ["energy is that of the processor, for all programs"]


async def test_energy_that_cannot_be_read_is_absent(job: Bench) -> None:
    unknown = changed(job, read_energy=lambda: (None, None))
    found = await measured(changed(unknown, limits=RoundLimits(1, None)))
    assert "energy" not in found.variants["plain"].rounds[0]


async def _outcome(tokens: int) -> Outcome:
    return {}, tokens


def test_a_round_without_values_is_null_for_scripts() -> None:
    full = made_up(1, 1)
    empty = replace(full.variants[1], rounds=[{}, {"ready_s": 1.0}])
    found = data(replace(full, variants=(full.variants[0], empty)))["variants"]
    assert isinstance(found, list)
    assert found[1]["rounds"] == [None, {"ready_s": 1.0}]


def test_comparisons_for_scripts_are_against_the_first_variant() -> None:
    found = data(made_up(1, 1.4))["comparisons"]
    assert isinstance(found, list)
    assert {entry["variant"] for entry in found} == {"base"}
    rate = next(entry for entry in found if entry["figure"] == "concurrent.total_rate")
    assert rate["low"] < 1.4 < rate["high"]
    assert rate["verdict"].startswith("1.4")
