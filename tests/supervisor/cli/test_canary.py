"""`corral engine canary --promote` where the daemon may not write `corral.toml`."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.cli import trial
from supervisor.daemon.control_client import Stream
from supervisor.daemon.control_messages import (
    CanariesStatus,
    DaemonStatus,
    ReloadReport,
    read,
)
from supervisor.errors import AccessDenied, CorralError, StartFailed

TEXT = '# mine\n[models.chat]\npath = "/m/chat.gguf"\n'
ENDED = CanariesStatus(
    running=[],
    ended=[
        {"model": "chat", "engine": "b11000-cpu", "outcome": "promoted", "reason": "", "at": "now"}
    ],
)


class Daemon:
    """A control socket whose daemon may not write, and then ends in `errors`."""

    def __init__(self, config: Path, *errors: CorralError) -> None:
        self._config = config
        self.reloaded = ""
        self._errors = [AccessDenied("read-only"), *errors]

    def status(self) -> DaemonStatus:
        model = {"name": "chat", "aliases": [], "path": "/m/chat.gguf"}
        found: DaemonStatus = read(DaemonStatus, {"config": str(self._config), "models": [model]})
        return found

    def canaries(self) -> CanariesStatus:
        running = {"model": "chat", "engine": "b11000-cpu"}
        found: CanariesStatus = read(CanariesStatus, {"running": [running], "ended": []})
        return found

    def end_canary(self, _: str, verb: str) -> Stream[CanariesStatus]:
        assert verb == "promote"
        if self._errors:
            raise self._errors.pop(0)
        yield {"waiting": 0.0}
        return ENDED

    def reload(self, *, dry_run: bool) -> Stream[ReloadReport]:
        assert not dry_run
        self.reloaded = self._config.read_text()
        yield {"waiting": 0.0}
        return ReloadReport([], [], [], [], [], [])


def connect(monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> None:
    monkeypatch.setattr(trial, "Client", lambda _: daemon)


def test_the_user_writes_a_file_that_the_daemon_may_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corral.toml"
    path.write_text(TEXT)
    connect(monkeypatch, Daemon(path))
    assert "was promoted" in trial.end(None, is_promoted=True).text
    assert path.read_text() == f'{TEXT}engine = "b11000-cpu"\n'


def test_the_file_is_put_back_where_the_build_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corral.toml"
    path.write_text(TEXT)
    daemon = Daemon(path, StartFailed("chat.0 did not start"))
    connect(monkeypatch, daemon)
    with pytest.raises(StartFailed):
        trial.end("chat", is_promoted=True)
    assert path.read_text() == TEXT
    assert list(tmp_path.iterdir()) == [path]
    assert daemon.reloaded == TEXT
