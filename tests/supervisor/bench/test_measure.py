"""Measures and checks variants of a tiny model on real engines."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support.samples import machine

from supervisor.bench.tune import QualityChecks
from supervisor.bench.tune_measure import Measurements, VariantPlans
from supervisor.bench.tune_search import GOALS, Figures
from supervisor.bench.tune_space import BASE, GoalName, Variant
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories

ONE_SLOT = Variant(frozenset({"slots"}), (("parallel", 1),))
TWO_INSTANCES = Variant(frozenset({"replicas"}), (("parallel", 1), ("threads", 1)), 2)


@pytest.fixture
def where(tmp_path: Path, runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Directories:
    parts = {name: tmp_path / name for name in ("config", "data", "log")}
    # Probing the engine takes a second: all tests share the result.
    cache = tmp_path_factory.getbasetemp() / "cache"
    return Directories(**parts, cache=cache, runtime=runtime)


@pytest.fixture
def plans(where: Directories, tiny_model: Path, engine_path: Path) -> VariantPlans:
    settings = Settings(engine=engine_path, models={"tiny": {"path": tiny_model}})
    return VariantPlans(settings, where, "tiny")


def engines(where: Directories) -> list[int]:
    ours = str(where.runtime)
    found = psutil.process_iter(["cmdline"])
    return [entry.pid for entry in found if ours in " ".join(entry.info["cmdline"] or ())]


@pytest.mark.parametrize(
    ("goal", "variant", "figures"),
    [
        ("latency", BASE, ("decode", "first_token_s")),
        ("throughput", TWO_INSTANCES, ("total",)),
        ("memory", ONE_SLOT, ("decode", "peak_bytes")),
    ],
)
async def test_each_goal_has_its_figures_and_leaves_no_engine(
    plans: VariantPlans,
    where: Directories,
    goal: GoalName,
    variant: Variant,
    figures: tuple[str, ...],
) -> None:
    found = await Measurements(GOALS[goal], plans, where).measure(variant, 60)
    assert isinstance(found, Figures), found
    assert all(getattr(found, figure) > 0 for figure in figures)
    assert engines(where) == []


async def test_a_measurement_ends_at_its_limit_with_its_engine(
    plans: VariantPlans, where: Directories
) -> None:
    found = await Measurements(GOALS["latency"], plans, where).measure(BASE, 0.01)
    assert found == "it took longer than 0 s"
    assert engines(where) == []


async def test_an_engine_that_does_not_start_is_a_failure_with_its_cause(
    plans: VariantPlans, where: Directories
) -> None:
    wrong = Variant(frozenset({"cache"}), (("override-tensor", "nonsense"),))
    found = await Measurements(GOALS["latency"], plans, where).measure(wrong, 60)
    assert isinstance(found, str)
    assert "tiny: " in found


def reason(plans: VariantPlans, variant: Variant) -> str:
    found = plans.usable((variant,))[variant]
    return found or ""


def test_what_does_not_fit_is_not_measured(
    where: Directories, tiny_model: Path, engine_path: Path
) -> None:
    settings = Settings(
        engine=engine_path,
        models={"tiny": {"path": tiny_model}},
        supervisor={"memory_budget": "60 MiB"},
    )
    plans = VariantPlans(settings, where, "tiny")
    many = Variant(frozenset({"slots"}), (("parallel", 64), ("ctx-size", 64 * 2048)))
    assert not reason(plans, ONE_SLOT)
    assert "it needs" in reason(plans, many)


def test_what_does_not_fit_into_free_memory_is_not_measured(
    plans: VariantPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = machine(memory_available_bytes=1024**2)
    monkeypatch.setattr("supervisor.bench.tune_measure.machine.read", lambda: short)
    assert "1.0 MiB are free" in reason(plans, ONE_SLOT)


def test_what_changes_nothing_is_not_measured(plans: VariantPlans) -> None:
    same = Variant(frozenset({"flash"}), (("flash-attn", "on"),))
    assert "changes nothing" in reason(plans, same)
    layers = Variant(frozenset({"device"}), (("gpu-layers", 1),))
    assert "no device" in reason(plans, layers)


async def test_a_rounded_cache_diverges_and_another_number_of_slots_does_not(
    plans: VariantPlans, where: Directories
) -> None:
    checks = QualityChecks(plans, where, lambda: 4)
    assert await checks.check(ONE_SLOT, 60) is None
    found = checks.found[ONE_SLOT]
    assert (found.equal, found.total) == (20, 20)
    rounded = Variant(frozenset({"cache"}), (("cache-type-k", "q4_0"), ("cache-type-v", "q4_0")))
    await checks.check(rounded, 60)
    rough = checks.found[rounded].divergence
    assert rough is not None
    assert found.divergence is not None
    assert rough > found.divergence
