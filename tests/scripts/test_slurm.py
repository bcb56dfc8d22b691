"""The job script of Slurm, in front of a daemon that only drains, and its settings files."""

import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import pytest
from support.corral_cli import PATIENCE_S, until

from supervisor.settings.schema import Settings

SLURM = Path(__file__).parent.parent.parent / "scripts" / "deploy" / "slurm"
SCRIPT = SLURM / "corral.sbatch"
CORRAL = """#!/bin/sh
trap 'echo drained >> log; exit 0' TERM
echo "$$" > pid
echo "$* $CORRAL_CONFIG $CORRAL_PROXY__ANNOUNCE_IN" >> log
while :; do sleep 0.01; done
"""
SCONTROL = """#!/bin/sh
echo "$*" >> log
"""


class JobTask:
    def __init__(self, directory: Path, array: Mapping[str, str] = MappingProxyType({})) -> None:
        self.directory = directory
        self.array = array
        for name, text in (("corral", CORRAL), ("scontrol", SCONTROL)):
            (directory / name).write_text(text, "utf-8")
            (directory / name).chmod(0o700)
        (directory / "tmp").mkdir()
        self.serving = f"serve {directory}/corral.toml {directory}/nodes"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        env = {
            **os.environ,
            "PATH": f"{self.directory}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "TMPDIR": str(self.directory / "tmp"),
            **self.array,
        }
        process = subprocess.Popen(
            ["/bin/bash", SCRIPT], cwd=self.directory, env=env, start_new_session=True
        )
        try:
            until(lambda: self.log() == [self.serving])
            yield process
        finally:
            with suppress(ProcessLookupError):  # unless the second SIGTERM is still to come
                os.killpg(process.pid, signal.SIGKILL)

    def log(self) -> list[str]:
        path = self.directory / "log"
        return path.read_text("utf-8").splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGUSR1, ["drained", "requeue 7"]), (signal.SIGUSR2, ["drained"])]
)
def test_a_task_drains_and_only_the_time_limit_requeues_it(
    tmp_path: Path, number: signal.Signals, ends: list[str]
) -> None:
    task = JobTask(tmp_path)
    with task.running() as process:
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert task.log() == [task.serving, *ends]
        assert not list((tmp_path / "tmp").iterdir())


def test_the_last_task_of_an_array_requeues_itself_alone(tmp_path: Path) -> None:
    task = JobTask(tmp_path, {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})
    with task.running() as process:
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE_S) == 0
        assert task.log()[-1] == "requeue 7_3"


def test_a_daemon_that_slurm_asks_to_end_drains_once(tmp_path: Path) -> None:
    task = JobTask(tmp_path)
    with task.running() as process:
        os.killpg(process.pid, signal.SIGTERM)  # as Slurm does, to all processes
        assert process.wait(PATIENCE_S) == 0
        assert task.log() == [task.serving, "drained"]


def test_a_killed_daemon_is_served_again(tmp_path: Path) -> None:
    task = JobTask(tmp_path)
    with task.running() as process:
        os.kill(int((tmp_path / "pid").read_text("utf-8")), signal.SIGKILL)
        until(lambda: task.log() == [task.serving] * 2)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(PATIENCE_S) == 0


def test_the_drain_fits_between_the_signal_and_the_time_limit() -> None:
    text = SCRIPT.read_text("utf-8")
    [signal_s] = map(int, re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE))
    [drain_s] = map(int, re.findall(r"DRAIN_TIMEOUT_S=(\d+)", text))
    supervisor = Settings().supervisor
    assert drain_s + 2 * supervisor.stop_timeout_s + 15 <= signal_s


@pytest.mark.parametrize("name", ["corral.toml", "front.toml"])
def test_the_settings_are_valid(name: str) -> None:
    Settings.model_validate(tomllib.loads((SLURM / name).read_text("utf-8")))
