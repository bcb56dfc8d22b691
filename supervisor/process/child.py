"""One process: spawned in its own session, heard to the end, and never left behind.

What this file promises:

- A signal is sent only while the process is our child and not yet reaped. Until then the kernel
  cannot give its number, or its group's, to anybody else. It is reaped in one place, on the loop's
  thread, so no check can race with it.
- When `keep` ends, by whatever way, the process is dead and reaped, its group is dead, and every
  file descriptor is closed.
- It does not outlive us. Three things see to that, each where the others cannot: the end of
  `keep`; the end of stdin, which an engine in child mode takes as the order to exit, once it has
  loaded; and the parent-death signal, which needs nothing of the engine and works while it loads.

On the parent-death signal: it is sent when the *thread* that spawned the process ends, so `spawn`
must be called on a thread that lives as long as the daemon, which is the one the loop runs on. It
survives exec, but not that of a set-user-ID program. A parent that died before the call would never
be noticed, hence the look at getppid after it. It is set in `preexec_fn`, which runs between fork
and exec: everything it needs was looked up before. The alternative, `setpriv --pdeathsig`, needs a
program that is not everywhere, and cannot look at getppid.

No core is written: it would hold what clients said, take gigabytes of disk, and for as long as that
takes a crashed engine would look like one that is silent.

Source: prctl(2) PR_SET_PDEATHSIG, pidfd_open(2) (Linux 5.3), setsid(2), kill(2); Linux,
fs/coredump.c, on a limit of 1.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Final

import psutil

from supervisor.process.launch import Launch

_CHUNK_BYTES: Final = 256 * 1024
_REAP_TIMEOUT_S: Final = 5.0
# Output that is still in the pipes when the process is gone is there at once; what takes longer
# comes from somebody who left the group and took the pipe along.
_REST_TIMEOUT_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
# The kernel writes no core to a file of one byte, and starts no program for one either.
_NO_CORE: Final = 1
_SHELL_SIGNAL: Final = 128
_REQUESTS_TO_LEAVE: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

OnBytes = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended.

    Attributes:
        returncode: Exit code, or minus the number of a signal, as `subprocess` gives it.
    """

    returncode: int

    @property
    def code(self) -> int | None:
        """Return the exit code, or None when a signal ended it."""
        return self.returncode if self.returncode >= 0 else None

    @property
    def signal(self) -> int | None:
        """Return the number of the signal that ended it, or None when it exited."""
        return -self.returncode if self.returncode < 0 else None

    @property
    def is_crash(self) -> bool:
        """Return whether a signal ended it that is no request to leave.

        A shell that stands before an engine tells of it by its exit code, 128 and the signal.
        Source: POSIX, Shell Command Language, 2.8.2.
        """
        number = self.signal or (self.code or 0) - _SHELL_SIGNAL
        return 0 < number < signal.NSIG and number not in _REQUESTS_TO_LEAVE


class Child:
    """A process of ours, made by `spawn`. `wait` must be awaited; it ends the process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    @classmethod
    def spawn(cls, launch: Launch) -> Child:
        """Start a process. Call it on the loop's thread; takes some milliseconds.

        Raises:
            OSError: The program cannot be run.
        """
        ours, (_, core_max) = os.getpid(), resource.getrlimit(resource.RLIMIT_CORE)
        core = (
            _NO_CORE if core_max == resource.RLIM_INFINITY else min(_NO_CORE, core_max),
            core_max,
        )
        process = subprocess.Popen(
            launch.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(launch.env),
            cwd=launch.cwd,
            start_new_session=True,
            preexec_fn=lambda: _prepare(ours, core),  # noqa: PLW1509 (see the module's docstring)
        )
        try:
            return cls(process)
        except OSError:
            process.kill()
            process.communicate()
            raise

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    def cpu_s(self) -> float | None:
        """Return the processor time it has used, or None when it is gone."""
        try:
            used = psutil.Process(self.pid).cpu_times()
        except (psutil.Error, OSError):
            return None
        return float(used.user + used.system)

    async def wait(self, hear_stdout: OnBytes, hear_stderr: OnBytes) -> Exit:
        """Pass on what the process says until it is gone, and bury it.

        Cancelled, it kills the process first. Waits without a limit: an engine may serve a year.
        """
        try:
            async with asyncio.TaskGroup() as pumps:
                ears = {
                    pumps.create_task(_pump(self._process.stdout, hear_stdout)),
                    pumps.create_task(_pump(self._process.stderr, hear_stderr)),
                }
                await _readable(self._pidfd)
                self.signal(signal.SIGKILL)  # whoever else is in its group
                _, deaf = await asyncio.wait(ears, timeout=_REST_TIMEOUT_S)
                for ear in deaf:
                    ear.cancel()
        finally:
            await self._reap()
        return Exit(self._process.returncode)

    def write_line(self, line: bytes) -> None:
        """Write a line to its stdin; nobody listening is no error."""
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.write(line)

    def close_stdin(self) -> None:
        """Close its stdin."""
        if self._process.stdin:
            self._process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group, unless it was reaped."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _reap(self) -> None:
        """Kill and reap it, and close everything."""
        try:
            self.signal(signal.SIGKILL)
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                await _readable(self._pidfd)
            self._process.wait()
        finally:
            os.close(self._pidfd)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe:
                    pipe.close()


def _prepare(  # pragma: no cover (runs between fork and exec)
    parent_pid: int, core: tuple[int, int]
) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, core)
    _die_with(parent_pid)


def _die_with(parent_pid: int) -> None:  # pragma: no cover (as above)
    if _prctl is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


async def _pump(pipe: IO[bytes] | None, hear: OnBytes) -> None:
    """Pass on every chunk until the other end is closed."""
    assert pipe is not None  # noqa: S101 (for mypy: spawn asked for a pipe)
    fd = pipe.fileno()
    os.set_blocking(fd, False)
    while True:
        await _readable(fd)
        with suppress(BlockingIOError):
            chunk = os.read(fd, _CHUNK_BYTES)
            if not chunk:
                return
            hear(chunk)


async def _readable(fd: int) -> None:
    """Wait until there is something to read, or, of a pidfd, until the process has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
