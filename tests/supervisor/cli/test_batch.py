"""`corral batch run`: its progress, and Ctrl-C before the daemon has accepted the batch."""

import io
from pathlib import Path

import pytest

from supervisor.cli import batch
from supervisor.cli.batch import Object, left_s, wait
from supervisor.errors import CorralError, DaemonBusy, Interrupted, NotRunning
from supervisor.output import ProgressMeter


def test_the_remaining_time_follows_the_rate_since_the_first_look() -> None:
    assert left_s(0, 40, 10.0) is None
    assert left_s(20, 20, 10.0) == 10.0
    assert left_s(40, 0, 20.0) == 0.0


RUNNING: Object = {
    "id": "batch_1",
    "status": "in_progress",
    "request_counts": {"completed": 1, "failed": 0, "total": 2},
}


def waited(failures: int, monkeypatch: pytest.MonkeyPatch, restart_max_s: float = 120.0) -> str:
    """Wait for a batch of a daemon that does not answer some requests; return the output."""
    answers: list[CorralError] = [*[NotRunning("no")] * failures, DaemonBusy("no answer")]

    def ask(_method: str, _path: str) -> Object:
        if answers:
            raise answers.pop()
        return {**RUNNING, "status": "completed"}

    monkeypatch.setattr(batch, "ask", ask)
    shown = io.StringIO()
    found = wait(RUNNING, ProgressMeter(shown), restart_max_s=restart_max_s)
    assert (found["status"], answers) == ("completed", [])
    return shown.getvalue()


def test_a_daemon_that_is_restarted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "batch_1 · 50 %" in waited(3, monkeypatch)


def test_the_wait_for_a_daemon_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DaemonBusy):
        waited(3, monkeypatch, restart_max_s=0.0)


def test_ctrl_c_while_the_file_is_sent_says_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **_content: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "ask", ask)
    (tmp_path / "some.jsonl").write_text('{"url": "/v1/completions"}\n')
    with pytest.raises(Interrupted, match="was sent") as caught:
        batch.run(tmp_path / "some.jsonl", None)
    assert "corral batch list" in (caught.value.hint or "")
