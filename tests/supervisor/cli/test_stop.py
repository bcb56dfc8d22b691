"""A daemon that keeps its lock after it said that it stopped; Ctrl-C while one is started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

from supervisor.cli import serve, start
from supervisor.errors import DaemonBusy, Interrupted
from supervisor.system.paths import Directories


class SaysItStopped:
    """A control client whose daemon agrees to everything."""

    def __init__(self, _socket: Path) -> None:
        pass

    def shutdown(self) -> Iterator[object]:
        yield {}


def test_the_wait_for_the_lock_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Directories(*[tmp_path] * 5)
    monkeypatch.setattr(start, "Client", SaysItStopped)
    assert start.stop_daemon(where).data == {"running": False}
    with (
        filelock.FileLock(where.lock_file, is_singleton=False),
        pytest.raises(DaemonBusy, match="own process"),
    ):
        start.stop_daemon(where, exit_timeout_s=0.01)


def test_ctrl_c_while_the_process_is_made_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "daemon"
    program.write_text("#!/bin/sh\nexec sleep 60\n", "utf-8")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    made: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def popen_interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        made.append(popen(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", popen_interrupted)
    with pytest.raises(Interrupted, match="it ends"):
        serve.spawn_daemon((), (), Directories(*[tmp_path] * 5))
    assert made[0].wait() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
