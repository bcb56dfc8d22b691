"""A process in its own session: spawns it, reads its output, and always kills and reaps it.

- A signal is sent only while the process is our child and not reaped yet: until then the kernel
  does not reuse its number or its group's. It is reaped in one place, on the loop's thread, so no
  check races with that.
- When `wait` ends, the process is dead and reaped, its group is dead, and every descriptor closed.
- It does not outlive the daemon, for three reasons: the end of `wait`; the end of stdin, at which a
  loaded engine in child mode exits; and the parent-death signal, which also works while it loads.
- A `GroupTether` also kills its descendants when the daemon ends, which the parent-death signal
  does not reach: the kernel sends SIGKILL to the group when the last writer of a pipe is gone,
  which is the daemon, as long as a process of the group holds the reader that it inherits.

Source: prctl(2) PR_SET_PDEATHSIG, sigprocmask(2) (exec keeps the mask), setsid(2), kill(2);
fcntl(2), F_SETOWN with a process group, F_SETSIG and O_ASYNC; Linux, fs/pipe.c (pipe_release).
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple

import psutil

from supervisor.builds.probe import creation_flags
from supervisor.system.daemon_lock import ChildExit, wait_readable
from supervisor.system.limits import set_soft_limit


class GroupTether:
    """A pipe whose `reader` a child inherits; `close` kills the rest of its group."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def attach(self) -> None:  # pragma: no cover (runs between fork and exec)
        with suppress(OSError, AttributeError):  # a sandbox or system without such signals
            fcntl.fcntl(self.reader, fcntl.F_SETOWN, -os.getpid())
            fcntl.fcntl(self.reader, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self.reader, fcntl.F_SETFL, os.O_ASYNC)

    def close(self) -> None:
        os.close(self._writer)


_CHUNK_BYTES: Final = 256 * 1024
_REAP_TIMEOUT_S: Final = 5.0
# Output left in the pipes is read at once; only a process that left the group and inherited a pipe
# takes longer.
_REST_TIMEOUT_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
# A core dump would hold clients' texts, take gigabytes, and make a crashed engine look silent while
# it is written. With a limit of one byte the kernel neither writes a dump nor starts a program for
# it (Source: Linux, fs/coredump.c).
_NO_CORE: Final = 1
_EXIT_SIGNALS: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

OnBytes = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run; `argv` begins with its path, `env` is complete.

    With `blocks_sigterm` it never receives SIGTERM, and SIGINT asks it to exit: Slurm sends SIGTERM
    to all processes of a job, which would end the engines before the daemon has drained.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: Path
    blocks_sigterm: bool = field(default=False, kw_only=True)


class ProcessorTime(NamedTuple):
    """Seconds of all threads of a process since its start."""

    used_s: float
    waited_s: float  # Ready to run, without a processor; 0 where the system does not tell.


@dataclass(frozen=True, slots=True)
class Exit:
    returncode: int  # minus the signal's number if a signal ended it
    # Whether the kernel's out-of-memory killer ended a process of ours then.
    is_out_of_memory: bool = False

    @property
    def code(self) -> int | None:
        return self.returncode if self.returncode >= 0 else None

    @property
    def signal(self) -> int | None:
        return -self.returncode if self.returncode < 0 else None

    @property
    def is_crash(self) -> bool:
        """Whether a signal ended it, other than a request to exit."""
        return 0 < self._signal < signal.NSIG and self._signal not in _EXIT_SIGNALS

    @property
    def is_kill(self) -> bool:
        """Whether SIGKILL ended it, sent by another program than the out-of-memory killer."""
        return self._signal == signal.SIGKILL and not self.is_out_of_memory

    @property
    def _signal(self) -> int:
        """The signal that ended it; below 1 without one.

        A shell in front of the engine reports it as exit code 128 plus the signal (Source: POSIX,
        Shell Command Language, 2.8.2).
        """
        return self.signal or (self.code or 0) - 128


class Child:
    """A child process. `wait` must be awaited; it kills and reaps the process."""

    def __init__(self, process: subprocess.Popen[bytes], tether: GroupTether | None = None) -> None:
        self._process = process
        self._tether = tether
        self._exit = ChildExit(process.pid)

    @classmethod
    def spawn(cls, command: Command, tether: GroupTether | None = None) -> Child:
        """Start a process; blocks for some milliseconds. Call it on the loop's thread.

        With a tether, descendants of the process do not outlive the daemon either. Raises OSError:
        the program cannot be run.
        """
        with ExitStack() as undo:
            if tether:
                undo.callback(tether.close)
            process = _popen(command, tether)
            undo.callback(process.communicate)
            undo.callback(process.kill)
            child = cls(process, tether)
            undo.pop_all()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float | None:
        try:
            used = psutil.Process(self.pid).cpu_times()
        except (psutil.Error, OSError):
            return None
        return float(used.user + used.system)

    def processor_time(self) -> ProcessorTime | None:
        """Return how long its threads computed and, on Linux, waited for a processor.

        Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat: nanoseconds on
        a processor, nanoseconds of waiting for one, turns.
        """
        cpu_s = self.cpu_s()
        if cpu_s is None:
            return None
        waited_ns = 0
        for thread in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # It has ended.
                waited_ns += int(thread.read_text("ascii").split()[1])
        return ProcessorTime(cpu_s, waited_ns / 1e9)

    def is_suspended(self) -> bool:
        """Return whether a signal such as SIGSTOP stopped it; False if a debugger holds it."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except (psutil.Error, OSError):
            return False

    async def wait(self, on_stdout: OnBytes, on_stderr: OnBytes) -> Exit:
        """Pass its output on until it exits; kill it if cancelled; reap it. No deadline."""
        try:
            async with asyncio.TaskGroup() as pumps:
                tasks = {
                    pumps.create_task(_pump(self._process.stdout, on_stdout)),
                    pumps.create_task(_pump(self._process.stderr, on_stderr)),
                }
                await self._exit.wait()
                self.signal(signal.SIGKILL)  # the rest of its group
                _, open_pumps = await asyncio.wait(tasks, timeout=_REST_TIMEOUT_S)
                for task in open_pumps:
                    task.cancel()
        finally:
            await self._reap()
        return Exit(self._process.returncode)

    def write_line(self, line: bytes) -> None:
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.write(line)

    def close_stdin(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group, unless it was reaped."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _reap(self) -> None:
        try:
            self.signal(signal.SIGKILL)
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                await self._exit.wait()
            self._process.wait()
        finally:
            self._exit.close()
            if self._tether:
                self._tether.close()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe:
                    pipe.close()


def _popen(command: Command, tether: GroupTether | None) -> subprocess.Popen[bytes]:
    ours = os.getpid()
    try:
        return subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(command.env),
            cwd=command.cwd,
            start_new_session=True,
            creationflags=creation_flags(),
            pass_fds=[tether.reader] if tether else [],
            preexec_fn=lambda: _prepare(ours, tether, command),  # noqa: PLW1509 (see _prepare)
        )
    finally:
        if tether:
            os.close(tether.reader)


def _prepare(  # pragma: no cover (runs between fork and exec)
    parent_pid: int, tether: GroupTether | None, command: Command
) -> None:
    """Prepare the child in `preexec_fn`: everything that this needs was imported before."""
    if command.blocks_sigterm:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    set_soft_limit("RLIMIT_CORE", _NO_CORE)
    if tether:
        tether.attach()
    else:
        # A worker that answers a client which has left would die of SIGPIPE (build 10434).
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # The parent-death signal is sent when the *thread* that spawned the process ends. It survives
    # exec, except of a set-user-ID program. A parent that died before the call goes unnoticed,
    # hence the check of getppid. `setpriv --pdeathsig` is not on every system, and has no check.
    if _prctl is None:
        return
    if os.sched_getscheduler(0) == os.SCHED_BATCH:  # the daemon's, beside engines that compute
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


async def _pump(pipe: IO[bytes] | None, on_bytes: OnBytes) -> None:
    assert pipe is not None  # noqa: S101 (for mypy: spawn asked for a pipe)
    fd = pipe.fileno()
    os.set_blocking(fd, False)
    while True:
        await wait_readable(fd)
        with suppress(BlockingIOError):
            chunk = os.read(fd, _CHUNK_BYTES)
            if not chunk:
                return
            on_bytes(chunk)
