"""A tuning that is ended at any moment leaves nothing; an outdated one is named."""

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


def test_a_profile_that_was_measured_on_another_engine_is_named_at_the_start(
    corral: CorralCli, tiny_model: Path
) -> None:
    tuned = corral.root / "config" / "profiles.d" / "tiny.toml"
    tuned.parent.mkdir(parents=True)
    tuned.write_text('[flags]\npoll = 0\n[tuned]\nengine = "b1"\n', "utf-8")
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n')
    started = corral("start", "tiny")
    for text in (started.stdout + started.stderr, corral.ok("status")):
        assert "the engine has changed from b1 to " in text
        assert "corral tune tiny --check measures whether it still helps" in text


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
