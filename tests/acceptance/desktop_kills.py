"""SIGKILL the example host, its `corral serve --desktop` or the daemon, at random moments.

Half of the hosts stream answers. Two seconds later nothing may be left: of the host's whole tree if
the host was killed, else of its backend; then the host is killed too. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)
from support.corral_cli import CorralCli  # noqa: E402
from support.desktop_process import processes_of  # noqa: E402

HOST = ROOT / "scripts" / "desktop_host" / "main.mjs"
VICTIMS = ("host", "process", "daemon")
# A backend is ready after 1 s on a free machine.
_ALIVE_MAX_S = 3.0
_LIMIT_S = 2.0
_CHAT_SHARE = 0.5


def main() -> int:
    options = _options()
    moments = random.Random(options.seed)  # noqa: S311 (the same for the same seed)
    took_s: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        corral = _corral(Path(directory))
        for number in range(options.kills):
            victim = VICTIMS[number % len(VICTIMS)]
            first_s, then_s = _kill_one(corral, victim, moments)
            took_s[victim].append(first_s)
            if victim != "host":
                took_s["host then"].append(then_s)
    return _report(took_s)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _corral(root: Path) -> CorralCli:
    corral = CorralCli(root)
    corral.configure(f'[models.slow]\npath = "{tiny_gguf.make_slow(root / "slow.gguf")}"\n')
    program = root / "corral"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m supervisor.cli "$@"\n')
    program.chmod(0o700)
    corral.env |= {"CORRAL": str(program), "PYTHONPATH": str(ROOT)}
    return corral


def _kill_one(corral: CorralCli, victim: str, moments: random.Random) -> tuple[float, float]:
    """Seconds until all processes have ended that must; then the same after a kill of the host."""
    reader, writer = os.pipe()
    quiet = subprocess.DEVNULL
    argv = ["node", str(HOST), "slow"]
    host = subprocess.Popen(
        argv, env=corral.env, cwd=corral.root, stdin=reader, stdout=quiet, stderr=quiet
    )
    os.close(reader)
    _use(writer, moments.uniform(0, _ALIVE_MAX_S), chats=moments.random() < _CHAT_SHARE)
    doomed, killed = _choose(corral, victim, host.pid)
    os.kill(killed, signal.SIGKILL)
    took_s = _wait_gone(corral, doomed)
    host.kill()
    host.wait()
    os.close(writer)
    return took_s, _wait_gone(corral, None)


def _use(writer: int, span_s: float, *, chats: bool) -> None:
    until_s = time.monotonic() + span_s
    while (left_s := until_s - time.monotonic()) > 0:
        if chats:
            os.write(writer, b"hello\n")  # refused until it serves, and while it answers
        time.sleep(min(0.1, left_s))


def _choose(corral: CorralCli, victim: str, host: int) -> tuple[list[psutil.Process] | None, int]:
    """The processes that must end (None: all), and the one to kill; the host before others run."""
    there = [process for process in processes_of(corral.root) if process.pid != host]
    found = [entry for entry in there if _is_running(entry) and _is_victim(entry, victim, host)]
    return (there, found[0].pid) if found else (None, host)


def _is_victim(process: psutil.Process, victim: str, host: int) -> bool:
    if victim == "process":
        return process.ppid() == host
    return victim == "daemon" and "--report-fd" in process.cmdline()


def _wait_gone(corral: CorralCli, doomed: list[psutil.Process] | None) -> float:
    began_s = time.monotonic()
    while _is_left(corral, doomed):
        if time.monotonic() - began_s > 10 * _LIMIT_S:
            break
        time.sleep(0.02)
    return time.monotonic() - began_s


def _is_left(corral: CorralCli, doomed: list[psutil.Process] | None) -> bool:
    if doomed is None:
        return bool(processes_of(corral.root))
    return any(_is_running(entry) for entry in doomed)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _report(took_s: dict[str, list[float]]) -> int:
    late = 0
    print(f"{'killed':10} {'times':>6} {'median s':>9} {'longest s':>10} {'left after 2 s':>15}")
    for victim, times in took_s.items():
        late += (left := sum(time > _LIMIT_S for time in times))
        median = sorted(times)[len(times) // 2]
        print(f"{victim:10} {len(times):6} {median:9.2f} {max(times):10.2f} {left:15}")
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
