"""Commands of hooks: their inputs and limits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from support.corral_cli import until

from supervisor.service.hook_commands import (
    HookRun,
    example,
    hook_command,
    hook_directory,
    missing_program,
    run_command,
)

EVENT = example("model_failed", datetime(2026, 11, 22, tzinfo=UTC), "chat", "gpu")
SURVIVOR = "sleep 600 & echo $!; exec sleep 600"


async def run(directory: Path, *words: str, timeout_s: float = 30) -> HookRun:
    return await run_command(hook_command(words, EVENT, directory), EVENT.as_json(), timeout_s)


async def test_a_command_gets_the_event_and_nothing_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "LLAMA_API_KEY", "CORRAL_PROXY__API_KEY", "https_proxy"):
        monkeypatch.setenv(name, "s3cret")
    ran = await run(tmp_path, "sh", "-c", "cat; pwd; env")
    assert ran.problem is None
    event, directory, *env = ran.output.splitlines()
    assert json.loads(event) == {
        "schema": 1,
        "event": "model_failed",
        "time": "2026-11-22T00:00:00.000+00:00",
        "model": "chat",
        "instance": "chat.0",
        "node": None,
        "cause": json.loads(EVENT.as_json())["cause"],
        "restarts": True,
        "idle_s": None,
    }
    assert directory == str(tmp_path)
    assert {"HOOK_EVENT=model_failed", "HOOK_MODEL=chat"} <= set(env)
    assert "s3cret" not in ran.output


async def test_an_exit_code_is_a_problem_and_its_output_is_kept(tmp_path: Path) -> None:
    ran = await run(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert ran.problem == "it exited with code 3"
    assert set(ran.output.splitlines()) == {"out", "err"}


async def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    ran = await run(tmp_path, "sh", "-c", SURVIVOR, timeout_s=2)
    assert ran.problem == "it did not end within 2 s and was killed"
    until(lambda: is_dead(int(ran.output)))


async def test_a_flood_is_cut_off(tmp_path: Path) -> None:
    ran = await run(tmp_path, "yes")
    assert ran.problem == "it wrote more than 1 MiB and was killed"
    assert len(ran.output) < 5000


async def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    for words, problem in {
        "./nothing": f"there is no program {tmp_path}/nothing",
        "./plain": f"{tmp_path}/plain is not executable (chmod +x {tmp_path}/plain)",
    }.items():
        assert (await run(tmp_path, words)).problem == problem
    missing = missing_program(hook_command(("no-such-program",), EVENT, tmp_path))
    assert missing
    assert missing.startswith("no-such-program is not in PATH")
    assert hook_directory(tmp_path / "corral.toml") == tmp_path


def test_nothing_outlives_a_daemon_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from supervisor.engine.child import Command
from supervisor.engine.child import Child
from supervisor.engine.child import GroupTether
async def main():
    command = Command(("sh", "-c", {SURVIVOR!r}), {{"PATH": "/usr/bin:/bin"}}, Path("/"))
    child = Child.spawn(command, GroupTether())
    await child.wait(lambda out: print(out.decode(), flush=True), print)
asyncio.run(main())
"""
    daemon = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert daemon.stdout
    survivor = int(daemon.stdout.readline())
    assert not is_dead(survivor)
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    daemon.stdout.close()
    until(lambda: is_dead(survivor))


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
