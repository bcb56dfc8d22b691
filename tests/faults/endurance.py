"""Many kills at random moments, and many restarts."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import psutil
from faults.daemon_under_test import DaemonUnderTest
from support.corral_cli import until

_ORPHANS_GONE_S = 2.0
# A daemon is up after about half a second: half of the kills meet it before, half after.
_MOMENT_MAX_S = 1.2


@dataclass(frozen=True)
class Kills:
    """The results of many kills.

    Attributes:
        daemons: Daemons killed.
        engines: Engines killed.
        orphans: Engines that outlived their daemon by more than 2 s.
        longest_s: The longest time from a daemon's death until its last engine was gone.
    """

    daemons: int = 0
    engines: int = 0
    orphans: int = 0
    longest_s: float = 0.0


def kill_often(target: DaemonUnderTest, count: int, seed: int) -> Kills:
    """Kill daemon or engine at a random moment, over and over.

    A life of the daemon ends when the dice choose it, or when it has no engine to kill.
    """
    dice = random.Random(seed)  # noqa: S311 (moments, no secrets)
    target.configure({"m": target.models.tiny}, after="replicas = 2")
    daemons = engines = orphans = 0
    longest_s = 0.0
    while daemons + engines < count:
        daemon = target.corral.serve(until_ready=False)
        while daemon.poll() is None:
            time.sleep(dice.uniform(0, _MOMENT_MAX_S))  # the moment is the point
            victims = target.corral.engines()
            if victims and dice.random() < 0.5 and daemons + engines < count:
                engines += 1
                _kill(dice.choice(victims))
                orphans += _strangers(target, daemon.pid)
                continue
            daemons += 1
            daemon.kill()
            daemon.wait()
            took_s, left = _wait_for_the_last(target)
            longest_s = max(longest_s, took_s)
            orphans += left
    return Kills(daemons, engines, orphans, longest_s)


def _kill(victim: psutil.Process) -> None:
    try:
        victim.kill()
    except psutil.NoSuchProcess:
        return


def _strangers(target: DaemonUnderTest, daemon: int) -> int:
    """Count the engines that have another parent than the daemon."""
    strangers = 0
    for engine in target.corral.engines():
        try:
            strangers += engine.ppid() != daemon
        except psutil.NoSuchProcess:
            continue
    return strangers


def _wait_for_the_last(target: DaemonUnderTest) -> tuple[float, int]:
    """Return how long the engines outlived their daemon, and how many still do."""
    try:
        return until(lambda: not target.corral.engines(), within_s=_ORPHANS_GONE_S), 0
    except AssertionError:
        left = target.corral.engines()
        for engine in left:
            _kill(engine)
        return _ORPHANS_GONE_S, len(left)


@dataclass(frozen=True)
class Kept:
    """The resources that many restarts left behind.

    Attributes:
        zombies: Children of the daemon that nobody buried.
        files_before: Files the daemon had open after the first restarts.
        files_after: And after the last.
        memory_grown_bytes: Growth of its memory between the two.
        took_s: How long the restarts took.
    """

    zombies: int
    files_before: int
    files_after: int
    memory_grown_bytes: int
    took_s: float


def restart_often(target: DaemonUnderTest, count: int) -> Kept:
    """Restart the model `m` over and over. The first five only warm the daemon up."""
    daemon = psutil.Process(target.corral.daemon_pid)
    _restart(target, min(5, count))
    files, memory = _open_files(daemon), daemon.memory_info().rss
    began_at_s = time.monotonic()
    _restart(target, count)
    return Kept(
        zombies=sum(child.status() == psutil.STATUS_ZOMBIE for child in daemon.children()),
        files_before=files,
        files_after=_open_files(daemon),
        memory_grown_bytes=daemon.memory_info().rss - memory,
        took_s=time.monotonic() - began_at_s,
    )


def _restart(target: DaemonUnderTest, count: int) -> None:
    for _ in range(count):
        for line in target.client.command("restart", ["m"]):
            assert "error" not in line
    assert target.instance("m.0").state == "ready"


def _open_files(daemon: psutil.Process) -> int:
    """Return how many files it has open, the least of some looks.

    It may need a moment to close the connection of a command that has just ended.
    """
    return min(_look_at_files(daemon) for _ in range(20))


def _look_at_files(daemon: psutil.Process) -> int:
    time.sleep(0.01)
    return daemon.num_fds()
