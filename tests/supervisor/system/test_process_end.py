"""The end of a process that is not a child of who waits."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from supervisor.system.daemon_lock import DaemonInfo, process_end


def owner_of(process: subprocess.Popen[bytes]) -> DaemonInfo:
    return DaemonInfo(process.pid, psutil.Process(process.pid).create_time(), "1", "http://x")


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_wait_returns_at_the_exit(monkeypatch: pytest.MonkeyPatch, *, has_pidfd: bool) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        process_end(owner_of(process)) as end,
    ):
        assert not end.wait(0.0)
        process.kill()
        if not has_pidfd:
            process.wait()  # a zombie still has a number
        assert end.wait(60)


def test_an_exited_process_is_not_waited_for() -> None:
    with process_end(None) as end:
        assert end.wait(0.0)
    with process_end(DaemonInfo(os.getpid(), 1.0, "1", "http://x")) as end:  # the number of another
        assert end.wait(0.0)
