"""A tuning that is ended at any moment leaves no engine, no file, and the daemon alone."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from support.corral_cli import CorralCli, until


def test_nothing_is_left_of_an_ended_search(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n')
    corral.serve()
    before = corral.instances()["tiny.0"].pid
    out = end_search(corral, signal.SIGINT, 130)
    assert "nothing was written" in out
    end_search(corral, signal.SIGKILL, -signal.SIGKILL)
    assert corral.instances()["tiny.0"].pid == before
    assert not (corral.root / "config" / "profiles.d").exists()


def end_search(corral: CorralCli, number: signal.Signals, code: int) -> str:
    """End a search once it has an engine, and return its output once that has ended too."""
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
    assert process.returncode == code
    until(lambda: len(corral.engines()) == 1)
    return out
