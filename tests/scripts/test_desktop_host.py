"""The example of a desktop application, used as a person does in a terminal."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.desktop_process import processes_of

ROOT = Path(__file__).parent.parent.parent
HOST = ROOT / "scripts" / "desktop_host" / "main.mjs"
NODE = shutil.which("node")


class Terminal:
    """The input of a person, and the output."""

    def __init__(self, corral: CorralCli, model: str) -> None:
        assert NODE
        self._shown = (corral.root / "shown").open("wb+")
        self.host = subprocess.Popen(
            [NODE, str(HOST), model],
            env=corral.env,
            cwd=corral.root,
            stdin=subprocess.PIPE,
            stdout=self._shown,
            stderr=self._shown,
        )

    def type(self, line: str) -> None:
        assert self.host.stdin
        self.host.stdin.write(f"{line}\n".encode())
        self.host.stdin.flush()

    @property
    def shown(self) -> str:
        return Path(self._shown.name).read_text("utf-8")

    def close(self) -> None:
        self.host.kill()
        self.host.wait()
        assert self.host.stdin
        self.host.stdin.close()
        self._shown.close()


@pytest.fixture
def terminal(corral: CorralCli, slow_model: Path) -> Iterator[Terminal]:
    corral.configure(f'[models.slow]\npath = "{slow_model}"\n')
    program = corral.root / "corral"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m supervisor.cli "$@"\n')
    program.chmod(0o700)
    corral.env |= {"CORRAL": str(program), "PYTHONPATH": str(ROOT)}
    terminal = Terminal(corral, "slow")
    yield terminal
    terminal.close()


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_it_shows_the_load_chats_cancels_starts_again_and_leaves_nothing(
    corral: CorralCli, terminal: Terminal
) -> None:
    until(lambda: "[slow is ready]" in terminal.shown)
    assert terminal.shown.startswith("[starting]\n[serving]\n[loading slow: ")
    before = len(terminal.shown)
    terminal.type("hello")
    until(lambda: len(terminal.shown) > before + 100)  # it streams
    terminal.type("/cancel")
    until(lambda: "[cancelled]" in terminal.shown)
    until(lambda: corral.slots_busy() == 0)

    os.kill(corral.daemon_pid, signal.SIGKILL)
    until(lambda: "[crashed: the daemon was killed]" in terminal.shown)
    until(lambda: terminal.shown.count("[slow is ready]") == 2)

    terminal.type("/quit")
    assert terminal.host.wait(PATIENCE_S) == 0
    assert terminal.shown.rstrip().endswith("[stopping]\n[ended]")
    assert processes_of(corral.root) == []
