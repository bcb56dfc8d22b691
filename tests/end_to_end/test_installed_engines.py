"""Installed builds on a running daemon: used, rolled back, removed; answers are not cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corral_cli import CorralCli, begin_stream, until
from support.installed_engines import install

NEW, OLD = "b11000-vulkan", "b10434-vulkan"
# Longer than a reload takes.
STREAM_TOKENS = 600


@pytest.fixture
def engines(corral: CorralCli, engine_path: Path) -> Path:
    engines = corral.root / "data" / "engines"
    for name in (OLD, NEW):
        install(engines, name, engine_path)
    return engines


def running(corral: CorralCli, model: str) -> str:
    """The build that the one ready instance of a model runs."""
    (engine,) = [
        instance.engine
        for name, instance in corral.instances().items()
        if name.startswith(f"{model}.") and instance.state == "ready"
    ]
    assert engine
    return Path(engine).parent.parent.name


def test_a_daemon_takes_up_the_build_in_use_without_cutting_an_answer(
    corral: CorralCli, tiny_model: Path, slow_model: Path, engines: Path
) -> None:
    own = f'[models.tiny]\npath = "{tiny_model}"\nengine = "{OLD}"\n'
    corral.configure(f'[models.slow]\npath = "{slow_model}"\n{own}')
    corral.ok("engine", "use", "b10434")
    corral.ok("start")
    assert (running(corral, "slow"), running(corral, "tiny")) == (OLD, OLD)
    stream = begin_stream(corral, STREAM_TOKENS, "slow")
    assert "corral reload" in corral("engine", "use", "b11000").stderr
    assert "replaced: slow.0\nkept: tiny.0" in corral.ok("reload")
    assert (running(corral, "slow"), running(corral, "tiny")) == (NEW, OLD)
    assert stream.read().strip().endswith(b"[DONE]")

    refused = corral("engine", "remove", NEW)
    assert refused.returncode == 1
    assert "it is the build in use" in refused.stderr
    assert f"in use: {OLD}" in corral.ok("engine", "rollback")
    assert f"{NEW} is not removed: slow.0~2 runs it" in corral("engine", "remove", NEW).stderr
    corral.ok("reload")
    until(lambda: len(corral.instances()) == 2)  # its predecessor has ended
    corral.ok("engine", "remove", NEW)
    assert not (engines / NEW).exists()
    assert "in use: no installed build" in corral.ok("engine", "rollback")
    assert "models.tiny.engine names it" in corral("engine", "remove", OLD).stderr


def test_without_a_settings_file_a_reload_still_takes_up_an_engine(
    corral: CorralCli, tiny_model: Path, engines: Path
) -> None:
    corral.ok("start", str(tiny_model), "--listen", "127.0.0.1:0")
    corral.ok("engine", "use", NEW)
    assert "replaced: tiny.0" in corral.ok("reload")
    assert running(corral, "tiny") == NEW


def test_missing_programs_are_named(corral: CorralCli, tiny_model: Path, engines: Path) -> None:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\nengine = "b1"\n')
    assert f"installed: {NEW}, {OLD}" in corral("plan", "tiny").stderr
    for words in (("use", "b1"), ("remove", "b1"), ("rollback",)):
        assert corral("engine", *words).returncode == 78
    assert corral("engine", "use", "../../etc").returncode == 78
