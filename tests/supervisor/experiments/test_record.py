"""What is left of canaries after a restart."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from supervisor.experiments.canary import CanaryRecord, CanaryRequest, EndedCanary

RUNNING = CanaryRequest("chat", Path("/opt/new/llama-server"), 0.1, None, 0.1)
ENDED = EndedCanary("code", "b10434-cpu", "promoted", "by command", "2026-01-01T00:00:00+00:00")


def test_what_ran_and_what_ended_is_read_again(tmp_path: Path) -> None:
    record = CanaryRecord(tmp_path / "canaries")
    assert record.read() == ([], [])
    record.save([RUNNING], [ENDED])
    assert record.read() == ([("chat", "/opt/new/llama-server")], [ENDED])
    (path,) = (tmp_path / "canaries").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("value", [{}, {"running": 3}, {"running": [], "ended": [{"model": "x"}]}])
def test_a_file_that_cannot_be_used_counts_as_missing(tmp_path: Path, value: object) -> None:
    record = CanaryRecord(tmp_path / "canaries")
    record.save([RUNNING], [])
    (path,) = (tmp_path / "canaries").iterdir()
    path.write_text(json.dumps(value))
    assert record.read() == ([], [])
