"""Processes by pid and creation time."""

import os
import subprocess
from dataclasses import replace

import pytest

from supervisor.system.daemon_lock import identity_of


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    ours = identity_of(os.getpid())
    assert ours.is_alive()
    assert not replace(ours, created_at=ours.created_at - 1).is_alive()


def test_a_process_that_nobody_waited_for_has_ended() -> None:
    child = subprocess.Popen(["/bin/sleep", "1000"])
    identity = identity_of(child.pid)
    assert identity.is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive()
    child.wait()


def test_no_process_has_no_identity() -> None:
    with pytest.raises(ProcessLookupError):
        identity_of(4_194_304)  # above any pid; source: proc(5), pid_max
