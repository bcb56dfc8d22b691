"""The end of a process that is not a child of who waits."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from supervisor.system.daemon_lock import ProcessIdentity, identity_of


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_wait_returns_at_the_exit(monkeypatch: pytest.MonkeyPatch, *, has_pidfd: bool) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identity_of(process.pid)
        assert not identity.wait(0.0)
        process.kill()
        assert identity.wait(60)  # a zombie has ended


def test_an_exited_process_is_not_waited_for() -> None:
    assert ProcessIdentity(os.getpid(), 1.0).wait(0.0)  # the number of another
    assert ProcessIdentity(2**22 + 1, 1.0).wait(0.0)


_WITHOUT_MAIN_THREAD = """
import ctypes, threading
threading.Thread(target=input).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
def test_a_process_whose_main_thread_has_ended_has_not() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WITHOUT_MAIN_THREAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        identity = identity_of(process.pid)
        assert process.stdout
        process.stdout.readline()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert not identity.wait(0.0)
        process.kill()
        assert identity.wait(60)
        assert process.poll() is not None
