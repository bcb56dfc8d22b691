"""Canaries after a restart."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from supervisor.experiments.canaries import Canary, read, save

RUNNING = Canary("chat", Path("/opt/new/llama-server"), 0.1, None, 0.1)
ENDED = {
    "model": "code",
    "engine": "b10434-cpu",
    "outcome": "promoted",
    "reason": "by command",
    "at": "2026-01-01T00:00:00+00:00",
}


def test_running_and_ended_canaries_are_read_again(tmp_path: Path) -> None:
    root = tmp_path / "canaries"
    assert read(root) == ([], [])
    save(root, [RUNNING], [ENDED])
    assert read(root) == ([("chat", "/opt/new/llama-server")], [ENDED])
    (path,) = (tmp_path / "canaries").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("value", [{}, {"running": 3}, {"running": [], "ended": [{"model": "x"}]}])
def test_a_file_that_cannot_be_used_counts_as_missing(tmp_path: Path, value: object) -> None:
    save(tmp_path / "canaries", [RUNNING], [])
    (path,) = (tmp_path / "canaries").iterdir()
    path.write_text(json.dumps(value))
    assert read(tmp_path / "canaries") == ([], [])
