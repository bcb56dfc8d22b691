"""Whether a model would fit is told by the estimate of `corral plan`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_gguf

from supervisor.cli.hub_model import MachineFit
from supervisor.cli.targets import choose
from supervisor.fleet.planner import LaunchPlanner
from supervisor.models import metadata
from supervisor.output import size
from supervisor.system.paths import Directories


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Directories:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return Directories(*(tmp_path / name for name in ("config", "data", "cache", "log", "run")))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.make(tmp_path / "m.gguf", embd=256, layers=4)


def test_a_model_takes_the_memory_of_its_plan(where: Directories, model: Path) -> None:
    found = metadata.read(model, cache_dir=where.cache)
    text, misfit = MachineFit(where).fit_of(found, projector_bytes=0)
    targets = choose([str(model)], None, where)
    plan = LaunchPlanner(targets.loaded.settings, where).plan(targets.names[0])
    assert misfit is None
    assert text.startswith(f"needs {size(plan.estimate.host.at_start)} of ")
    assert f"with {plan.ctx_size:,} tokens" in text
    larger, _ = MachineFit(where).fit_of(found, projector_bytes=1024**3)
    assert larger != text


def test_the_memory_that_models_may_use_is_the_limit(
    where: Directories, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_SUPERVISOR__MEMORY_BUDGET", "8 MiB")
    here = MachineFit(where)
    assert here.room.host == 8 * 1024**2
    _, misfit = here.fit_of(metadata.read(model, cache_dir=where.cache), projector_bytes=0)
    assert misfit
    assert "models may use 8.0 MiB" in misfit


def test_without_an_engine_sizes_are_compared(
    where: Directories, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_ENGINE", "/nowhere/llama-server")
    monkeypatch.setenv("CORRAL_SUPERVISOR__MEMORY_BUDGET", "8 MiB")
    found = metadata.read(model, cache_dir=where.cache)
    here = MachineFit(where)
    assert "no engine is installed" in here.fit_of(found, projector_bytes=0)[0]
    assert here.fit_of(found, projector_bytes=0)[1] is None
    assert here.fit_of(found, projector_bytes=8 * 1024**2)[1]
