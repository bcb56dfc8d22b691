"""Threads that follow the load of a machine, on the real engine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import loaded_daemon, tiny_gguf
from support.corral_cli import CorralCli, begin_stream, until
from support.host_files import HostFiles

TICKS = 100


class Load:
    """Other programs of a machine with two cores, which take `cores` of them."""

    def __init__(self, root: Path) -> None:
        self.files, self.cores = HostFiles(root), 0.0
        self._busy = 0.0
        self._ended = threading.Event()
        self.note(0)

    def note(self, span_s: float) -> None:
        self._busy += self.cores * span_s * TICKS
        lines = f"cpu0 {self._busy:.0f} 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0"
        self.files.replace("proc/stat", lines)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._ended.wait(0.01):
            before_s, now_s = time.monotonic(), before_s
            self.note(before_s - now_s)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    found = Load(tmp_path / "machine")
    with found.running():
        yield found


def threads(corral: CorralCli) -> list[str]:
    """Return the decode threads of each engine."""
    argvs = corral.engine_argvs()
    return [argv[argv.index("--threads") + 1] for argv in argvs if "--threads" in argv]


@pytest.fixture
def daemon(corral: CorralCli, load: Load) -> Iterator[None]:
    corral.env["CORRAL_SUPERVISOR__ADAPTIVE"] = "true"
    argv = [sys.executable, loaded_daemon.__file__, str(load.files.root)]
    env = {**corral.env, "PYTHONPATH": ":".join(filter(None, sys.path))}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(argv, env=env, cwd=corral.root, stdout=quiet, stderr=quiet) as process:
        try:
            until(corral.is_running)
            yield
        finally:
            process.terminate()


def test_threads_fall_and_come_back_and_a_running_stream_is_not_cut(
    corral: CorralCli, load: Load, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = tiny_gguf.make(tmp_path / "tiny.gguf", mode="cycle")
    # After a change, the next one waits for queued_s.
    corral.configure(f'[models.tiny]\npath = "{model}"\nslots = {{ queued_s = 2 }}')
    request.getfixturevalue("daemon")  # reads the settings
    corral.ok("start")
    assert threads(corral) == ["2"]

    stream = begin_stream(corral, 2000)
    load.cores = 1
    until(lambda: "1" in threads(corral))
    assert "[DONE]" in stream.read().decode()
    until(lambda: threads(corral) == ["1"])
    reason = "1 of 2 physical cores: other programs take "
    assert f"tiny: threads = 1 now: {reason}" in corral.ok("status")
    assert f"machine: {reason}" in corral.ok("plan", "tiny")

    load.cores = 0
    until(lambda: threads(corral) == ["2"])
    until(lambda: corral.status().models[0].adapted == [])
