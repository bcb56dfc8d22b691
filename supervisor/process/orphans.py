"""Ends engines that a dead daemon left behind, and nobody else.

Engines die with their daemon (`child.py` says how), so there is next to nothing to find: an engine
in a set-user-ID wrapper, one on a system without the parent-death signal, one that was loading
when the daemon was killed there. What is left holds memory and the socket's name.

A process is proven ours by all of these, or it is left alone:

- it is our user's, leads a session of its own as every engine does, and is no child of ours;
- its environment carries our marker with this runtime directory, whose lock we hold, so that its
  daemon is dead;
- it runs the program that the marker names.

The proof is taken while a pidfd holds on to the process, and the signal goes through that pidfd: a
number that is given to another process in between is never signalled.

Source: proc(5) /proc/PID/environ, pidfd_open(2), pidfd_send_signal(2), setsid(2).
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from supervisor.events import Emit
from supervisor.process.launch import PROCESS_TAG_ENV, ProcessTag

# A killed process is gone at once, unless the kernel holds it in a driver; nobody waits for that.
_GONE_WITHIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class OrphanEngine:
    """An engine without a daemon.

    Attributes:
        pid: Its process id.
        instance: The instance that it was a run of.
        since: When it was created.
    """

    pid: int
    instance: str
    since: datetime


def kill_orphans(runtime: Path, emit: Emit) -> tuple[OrphanEngine, ...]:
    """End every engine that a dead daemon of this runtime directory left; return them.

    Call it while holding the directory's lock and before anything is spawned. Takes some
    milliseconds where there is nothing to do, and up to 2 s for each that is found.
    """
    return tuple(
        stray for pid in psutil.pids() if (stray := _kill_orphan(pid, runtime, emit)) is not None
    )


def _kill_orphan(pid: int, runtime: Path, emit: Emit) -> OrphanEngine | None:
    if prove(pid, runtime) is None:
        return None
    with _held(pid) as pidfd:
        # Proven again: only now nobody else can be given its number.
        stray = prove(pid, runtime) if pidfd is not None else None
        if stray is None or pidfd is None:
            return None
        _kill(pid, pidfd)
    emit(
        "engine.orphan_killed",
        instance=stray.instance,
        pid=pid,
        since=stray.since.isoformat(timespec="seconds"),
    )
    return stray


def prove(pid: int, runtime: Path) -> OrphanEngine | None:
    """Return the stray that a process is, or None when it cannot be proven one."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid() or process.ppid() == os.getpid():
            return None
        marker = ProcessTag.read(process.environ().get(PROCESS_TAG_ENV, ""))
        if marker is None or marker.runtime != runtime or os.getsid(pid) != pid:
            return None
        runs_it = process.cmdline()[:1] == [str(marker.program)]
        since = datetime.fromtimestamp(process.create_time(), UTC)
        return OrphanEngine(pid, marker.instance, since) if runs_it else None
    except (psutil.Error, OSError):
        return None  # gone, or hidden from us: nothing is proven


@contextmanager
def _held(pid: int) -> Iterator[int | None]:
    """Hold on to a process for the length of the block; None when it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _kill(pid: int, pidfd: int) -> None:
    """Kill a process, then who is left of its group, and wait until it is gone."""
    with suppress(ProcessLookupError):
        # Its group first: while its leader lives, the number of the group is nobody else's.
        os.killpg(pid, signal.SIGKILL)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    select.select([pidfd], [], [], _GONE_WITHIN_S)
