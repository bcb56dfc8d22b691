"""A daemon on a system without Linux's own interfaces, as macOS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.corral_cli import CorralCli, until

PROGRAM = Path(__file__).parent.parent / "support" / "other_system.py"
SETTINGS = '[models.tiny]\npath = "{path}"\nflags = {{ ctx-size = 512 }}\n'


class OtherSystem(CorralCli):
    def argv(self, *words: str) -> list[str]:
        return [sys.executable, str(PROGRAM), *words]


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> OtherSystem:
    return OtherSystem(tmp_path_factory.mktemp("c"))


def test_a_daemon_serves_restarts_and_stops_without_linux(
    other: OtherSystem, tiny_model: Path
) -> None:
    other.configure(SETTINGS.format(path=tiny_model))
    daemon = other.serve()
    try:
        assert other.model_states() == {"tiny": "loaded"}
        (engine,) = other.engines()
        os.kill(engine.pid, signal.SIGKILL)
        until(lambda: [engine.pid for engine in other.engines()] not in ([], [engine.pid]))
        other.ok("start")
        assert other.data("doctor")
        other.ok("stop")
        assert daemon.wait(60) == 0
        assert not other.engines()
    finally:
        other.end()


def test_the_engine_of_a_daemon_that_was_killed_is_ended_by_the_next_one(
    other: OtherSystem, tiny_model: Path
) -> None:
    other.configure(SETTINGS.format(path=tiny_model))
    daemon = other.serve()
    try:
        daemon.kill()
        daemon.wait()
        other.serve()
        assert len(other.engines()) == 1
        other.ok("stop")
    finally:
        other.end()


@pytest.mark.parametrize("words", [["--help"], ["config", "path"], ["plan", "--help"]])
def test_commands_need_no_interface_of_linux(other: OtherSystem, words: list[str]) -> None:
    done = subprocess.run(
        other.argv(*words), env=other.env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
