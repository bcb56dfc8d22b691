"""A bench measures thread counts before it compares, as the first starts of a daemon do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from supervisor.bench import own_engine
from supervisor.bench.own_engine import measure_threads
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories
from supervisor.system.processor_load import ProcessorReading


@pytest.fixture
def where(runtime: Path) -> Directories:
    return Directories(*[runtime] * 5)


def busy_with(monkeypatch: pytest.MonkeyPatch, others_cores: float) -> None:
    """Let other programs take so many cores."""
    seconds = itertools.count()

    def read(_pids: Iterable[int]) -> ProcessorReading:
        at_s = next(seconds)
        return ProcessorReading(at_s, others_cores * at_s, 0, None, {}, is_low_priority=False)

    monkeypatch.setattr(own_engine, "read_this_processor", read)


def test_each_count_is_measured_once(
    where: Directories, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy_with(monkeypatch, others_cores=0)
    planner = LaunchPlanner(Settings(models={"tiny": {"path": tiny_model}}), where)
    untried = planner.plan("tiny").untried_threads
    measure_threads(planner, "tiny", where)
    assert untried in planner.measurements(tiny_model, planner.engine()).read()
    assert planner.plan("tiny").untried_threads is None


def test_a_busy_machine_is_not_measured(
    where: Directories, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy_with(monkeypatch, others_cores=1)
    planner = LaunchPlanner(Settings(models={"tiny": {"path": tiny_model}}), where)
    measure_threads(planner, "tiny", where)
    assert planner.plan("tiny").untried_threads is not None


def test_a_model_that_does_not_run_is_left_to_its_next_start(
    where: Directories, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy_with(monkeypatch, others_cores=0)
    table = {"path": tiny_model, "args": ["--no-such-flag"]}
    planner = LaunchPlanner(Settings(models={"tiny": table}), where)
    measure_threads(planner, "tiny", where)
    assert planner.measurements(tiny_model, planner.engine()).read() == {}
