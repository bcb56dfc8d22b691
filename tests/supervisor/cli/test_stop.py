"""A daemon that said that it stopped, and whose lock is not given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

from supervisor.cli import start
from supervisor.errors import DaemonBusy
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
    monkeypatch.setattr(start, "_EXIT_TIMEOUT_S", 0.01)
    assert start.stop_daemon(where).data == {"running": False}
    with (
        filelock.FileLock(where.lock_file, is_singleton=False),
        pytest.raises(DaemonBusy, match="own process"),
    ):
        start.stop_daemon(where)
