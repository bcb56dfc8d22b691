"""`corral batch run`: its progress, and Ctrl-C before the daemon has accepted the batch."""

import io
from pathlib import Path
from typing import Self

import pytest

from supervisor.cli import batch
from supervisor.cli.batch import Object, left_s, wait
from supervisor.errors import DaemonBusy, Interrupted, NotRunning
from supervisor.output import ProgressMeter


def test_the_rest_takes_as_long_as_what_was_done_since_the_first_look() -> None:
    assert left_s(0, 40, 10.0) is None
    assert left_s(20, 20, 10.0) == 10.0
    assert left_s(40, 0, 20.0) == 0.0


class RestartedClient:
    """The daemon does not answer some requests, and the last one finds the batch complete."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.connects = 0

    def get(self, _id: str) -> Object:
        if self.left:
            raise DaemonBusy("the daemon does not answer")
        return {**RUNNING, "status": "completed"}

    def reconnect(self) -> None:
        self.left -= 1
        self.connects += 1
        if self.left:
            raise NotRunning("it does not run yet")


RUNNING: Object = {
    "id": "batch_1",
    "status": "in_progress",
    "request_counts": {"completed": 1, "failed": 0, "total": 2},
}


def waited(client: RestartedClient, restart_max_s: float = 120.0) -> tuple[Object, str]:
    shown = io.StringIO()
    meter = ProgressMeter(shown)
    found = wait(client, RUNNING, meter, restart_max_s=restart_max_s)  # type: ignore[arg-type]
    return found, shown.getvalue()


def test_a_daemon_that_is_restarted_is_waited_for() -> None:
    client = RestartedClient(3)
    found, shown = waited(client)
    assert (found["status"], client.connects) == ("completed", 3)
    assert "batch_1 · 50 %" in shown


def test_the_wait_for_a_daemon_ends() -> None:
    with pytest.raises(DaemonBusy):
        waited(RestartedClient(3), restart_max_s=0.0)


class InterruptedClient:
    """Ctrl-C comes while the file is sent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def upload(self, _path: Path) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_file_is_sent_says_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "BatchClient", InterruptedClient)
    (tmp_path / "some.jsonl").write_text('{"url": "/v1/completions"}\n')
    with pytest.raises(Interrupted, match="was sent") as caught:
        batch.run(tmp_path / "some.jsonl", None)
    assert "corral batch list" in (caught.value.hint or "")
