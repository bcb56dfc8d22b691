"""Engines of a command's own: their answers and failures, and that none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.corral_cli import PATIENCE_S, until

from supervisor.bench.own_engine import private_instance
from supervisor.engine.client import EngineUnreachable
from supervisor.engine.orphans import is_in_use, private_runtime
from supervisor.errors import EngineFailed, StartFailed
from supervisor.fleet.planner import LaunchPlanner
from supervisor.plan.plan import Plan, PlanLine
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories

# Starts an instance as a command does, tells its engine's number, and waits.
COMMAND = """
import asyncio, sys
from pathlib import Path
from supervisor.bench.own_engine import private_instance
from supervisor.fleet.planner import LaunchPlanner
from supervisor.system.paths import Directories
from supervisor.settings.schema import Settings

where = Directories(*[Path(sys.argv[1])] * 5)
plan = LaunchPlanner(Settings(models={"tiny": {"path": sys.argv[2]}}), where).plan("tiny")

async def main():
    async with private_instance(plan, where) as one:
        print(one.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def where(runtime: Path) -> Directories:
    return Directories(*[runtime] * 5)


@pytest.fixture
def plan(where: Directories, tiny_model: Path) -> Plan:
    return LaunchPlanner(Settings(models={"tiny": {"path": tiny_model}}), where).plan("tiny")


def with_flag(plan: Plan, flag: str, value: str | None) -> Plan:
    return replace(plan, lines=(*plan.lines, PlanLine(flag, value, "a test", "")))


def own_directories(where: Directories) -> list[Path]:
    return [path for path in (where.runtime / "own").iterdir() if path.is_dir()]


async def test_it_answers_with_its_own_key_and_leaves_nothing(
    plan: Plan, where: Directories
) -> None:
    async with private_instance(plan, where) as one:
        (own,) = own_directories(where)
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        async with one.client() as client:
            assert await client.is_ours()
        assert one.ready_s > 0
        assert (one.peak_memory_bytes() or 0) > 1024**2
    assert not psutil.pid_exists(one.pid)
    assert own_directories(where) == []
    assert one.peak_memory_bytes() is None


async def test_two_run_at_once(plan: Plan, where: Directories) -> None:
    async with private_instance(plan, where) as one, private_instance(plan, where) as other:
        assert one.pid != other.pid
        assert len(own_directories(where)) == 2


async def test_a_failed_start_has_its_cause(plan: Plan, where: Directories) -> None:
    with pytest.raises(StartFailed, match="no-such-flag") as caught:
        async with private_instance(with_flag(plan, "--no-such-flag", None), where):
            pass
    assert Path(caught.value.log or "").is_file()
    assert own_directories(where) == []


async def test_an_engine_that_ends_while_it_is_used_has_its_cause(
    plan: Plan, where: Directories
) -> None:
    async def use() -> None:
        async with private_instance(plan, where) as one, one.client() as client:
            os.kill(one.pid, signal.SIGKILL)
            for _ in range(1000):
                await client.get("/health")

    with pytest.raises(EngineFailed, match=r"killed \(SIGKILL, signal 9\)"):
        await use()


async def test_an_error_of_the_block_is_unchanged(plan: Plan, where: Directories) -> None:
    with pytest.raises(EngineUnreachable, match="ours"):
        async with private_instance(plan, where):
            raise EngineUnreachable("ours")


async def test_a_cancelled_start_leaves_no_engine(plan: Plan, where: Directories) -> None:
    before = psutil.Process().children()

    async def start() -> None:
        async with private_instance(plan, where):
            await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        starting = group.create_task(start())
        while psutil.Process().children() == before:  # noqa: ASYNC110 (a process tells no one)
            await asyncio.sleep(0.001)
        starting.cancel()
    assert (where.log / "private-engines.log").exists()
    assert psutil.Process().children() == before
    assert own_directories(where) == []


def test_a_killed_command_leaves_no_engine_and_the_next_removes_its_directory(
    plan: Plan, where: Directories, tiny_model: Path
) -> None:
    argv = [sys.executable, "-c", COMMAND, str(where.runtime), str(tiny_model)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout
        engine = psutil.Process(int(command.stdout.readline()))
        (left,) = own_directories(where)
        assert is_in_use(where)
        command.kill()
        command.wait()
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    assert not is_in_use(where)
    with private_runtime(where) as own:
        assert own_directories(where) == [own] != [left]
        assert is_in_use(where)
    assert not is_in_use(where)
