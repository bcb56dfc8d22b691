"""A tuning that is ended at any moment leaves no engine, no file, and the daemon alone."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from support.corral_cli import CorralCli, until


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_an_ended_search(
    corral: CorralCli, tiny_model: Path, number: signal.Signals
) -> None:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n')
    corral.serve()
    before = corral.instances()["tiny.0"]["pid"]
    process = subprocess.Popen(
        corral.argv("tune", "tiny", "--force"),
        env=corral.env,
        cwd=corral.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(corral.engines()) > 1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    until(lambda: len(corral.engines()) == 1)
    assert corral.instances()["tiny.0"]["pid"] == before
    assert not (corral.root / "config" / "profiles.d").exists()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "nothing was written" in out
