"""Kills engines that a dead daemon left behind, and no other process.

Engines die with their daemon (see `child.py`), so there is rarely one: an engine in a set-user-ID
wrapper, on a system without the parent-death signal, or one that was loading there. It holds memory
and the socket.

A process is killed only if it is our user's, leads its own session, is not our child, carries this
runtime directory (whose lock we hold, so its daemon is dead) in its environment, and runs the
program named there. It is held from the check to the signal, so that a reused process number is
never signalled.

Source: proc(5) /proc/PID/environ, setsid(2).
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from supervisor.events import Emit
from supervisor.host.process_end import held
from supervisor.process.launch import PROCESS_TAG_ENV, ProcessTag

# A killed process ends at once, unless it is stuck in a driver.
_END_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class OrphanEngine:
    """An engine without a daemon, created at `since`."""

    pid: int
    instance: str
    since: datetime


def kill_orphans(runtime: Path, emit: Emit) -> tuple[OrphanEngine, ...]:
    """Kill every engine that a dead daemon of this runtime directory left; return them.

    Call it while holding the directory's lock, before anything is spawned. Blocks for up to 2 s for
    each engine.
    """
    return tuple(
        orphan for pid in psutil.pids() if (orphan := _kill_orphan(pid, runtime, emit)) is not None
    )


def _kill_orphan(pid: int, runtime: Path, emit: Emit) -> OrphanEngine | None:
    if prove(pid, runtime) is None:
        return None
    with held(pid) as kill:
        # Checked again: only now its number cannot be reused.
        orphan = prove(pid, runtime) if kill else None
        if orphan is None or kill is None:
            return None
        with suppress(ProcessLookupError):
            # Its group first: while the leader lives, the group's number is not reused.
            os.killpg(pid, signal.SIGKILL)
        kill(_END_TIMEOUT_S)
    emit(
        "engine.orphan_killed",
        instance=orphan.instance,
        pid=pid,
        since=orphan.since.isoformat(timespec="seconds"),
    )
    return orphan


def prove(pid: int, runtime: Path) -> OrphanEngine | None:
    """Return the orphan that a process certainly is, or None."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid() or process.ppid() == os.getpid():
            return None
        marker = ProcessTag.read(process.environ().get(PROCESS_TAG_ENV, ""))
        if marker is None or marker.runtime != runtime or os.getsid(pid) != pid:
            return None
        runs_program = process.cmdline()[:1] == [str(marker.program)]
        since = datetime.fromtimestamp(process.create_time(), UTC)
        return OrphanEngine(pid, marker.instance, since) if runs_program else None
    except (psutil.Error, OSError):
        return None  # gone or inaccessible
