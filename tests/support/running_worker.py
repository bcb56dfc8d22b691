"""`corral worker` as a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from support.corral_cli import CorralCli


class RunningWorker:
    """A worker that has printed its address, and may be killed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        self.process = process
        self.greeting = process.stdout.readline()
        self.address = self.greeting.partition("worker ready at ")[2].split(" ")[0]

    @property
    def server(self) -> psutil.Process:
        """The `ggml-rpc-server` that it supervises."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_worker(corral: CorralCli, port: str = "0") -> Iterator[RunningWorker]:
    with subprocess.Popen(
        corral.argv("worker", "--threads", "1", "--port", port),
        env=corral.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield RunningWorker(process)
        finally:
            process.kill()
