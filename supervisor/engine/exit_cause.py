"""Why an engine ended, how to fix it, and whether a restart can help. Pure.

Nearly every failure of llama-server is exit code 1, and its last output is rarely the reason: a
usage error is followed by the help text, a missing file by three lines that pass the error on. So
the first line that matches a row of `FAILURE_PATTERNS` decides. Two kinds of evidence come before
it: a signal that says enough by itself (`SIGNALS`), and lines that name the file
(`SPECIFIC_PATTERNS`).
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.engine.exit_patterns import (
    FAILURE_PATTERNS,
    SPECIFIC_PATTERNS,
    WARNING_PATTERNS,
    LogPattern,
)
from supervisor.errors import CorralError

_QUOTE_MAX: Final = 200
_TEXT_MAX: Final = 300
# Shortages that may end.
_TRANSIENT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


@dataclass(frozen=True, slots=True)
class FailureCause:
    code: str  # stable, in snake case
    sentence: str  # without a full stop
    hint: str  # how to fix it
    permanent: bool  # whether a restart without a change is useless


# Causes outside of the engine and its requests: an RPC worker is gone, or other programs hold the
# memory of a device. The instance waits for their end; they count against no engine or request.
EXTERNAL: Final = frozenset({"rpc_lost", "worker_unreachable", "device_memory_short"})

# An operator or a watchdog killed it; neither the engine nor a request is to blame.
KILLED_FROM_OUTSIDE: Final = FailureCause(
    "killed",
    "another program killed the engine (SIGKILL, signal 9); it did not crash",
    "no core is written, and neither corral nor the kernel's out-of-memory killer sent it: look "
    "for `kill -9`, earlyoom or systemd-oomd (`journalctl -u systemd-oomd`)",
    permanent=False,
)
_ASSERTION: Final = "assertion"

# Signals that say enough, whatever the log says.
SIGNALS: Final[Mapping[int, FailureCause]] = MappingProxyType(
    {
        signal.SIGILL: FailureCause(
            "illegal_instruction",
            "the engine was built for another processor: this one lacks an instruction "
            "(SIGILL, signal 4)",
            "use a build for this processor, or try no-repack; `corral engine list` shows others",
            permanent=True,
        ),
        signal.SIGSEGV: FailureCause(
            "memory_fault",
            "the engine crashed with a memory fault (SIGSEGV, signal 11)",
            "on processors with AMX some builds fault at their first token: try no-repack",
            permanent=False,
        ),
        signal.SIGBUS: FailureCause(
            "model_changed",
            "the engine could not read a memory-mapped file (SIGBUS, signal 7)",
            "most likely the model's file changed or shrank while in use: restore it",
            permanent=False,
        ),
        signal.SIGFPE: FailureCause(
            "arithmetic_fault",
            "the engine crashed with an arithmetic fault (SIGFPE, signal 8)",
            "the model's header may be wrong (`corral model show FILE`), or try another build",
            permanent=False,
        ),
        signal.SIGKILL: FailureCause(
            "killed",
            "the engine was killed (SIGKILL, signal 9)",
            "most often the kernel, out of memory: see `dmesg`; lower ctx-size or use low-memory",
            permanent=False,
        ),
    }
)


def diagnose(returncode: int | None, lines: Sequence[str]) -> FailureCause:
    """Find the cause in the last lines of output, oldest first; `returncode` may be unknown."""
    if returncode is not None and (known := SIGNALS.get(-returncode)):
        return known
    return (
        _first(SPECIFIC_PATTERNS, lines)
        or _first(FAILURE_PATTERNS, lines)
        or _cause_of_exit(returncode, lines)
    )


def has_aborted(lines: Sequence[str]) -> bool:
    """Return whether the engine stopped at an assertion of its own."""
    found = _first(FAILURE_PATTERNS, lines)
    return found is not None and found.code == _ASSERTION


def crash_cause(returncode: int, requests: int) -> FailureCause:
    """Return the cause of a crash during requests; ignores the log, which may quote clients."""
    by = signal_name(-returncode) if returncode < 0 else f"a signal (code {returncode})"
    many = "a request" if requests == 1 else f"{requests} requests"
    return FailureCause(
        "crashed_at_request",
        f"the engine was ended by {by} while it computed {many}",
        "`upstream.failed` in the daemon's log names them; one that crashes two engines is refused",
        permanent=False,
    )


def load_timeout(silent_s: float) -> FailureCause:
    return FailureCause(
        "load_stalled",
        f"the engine wrote nothing for {silent_s:g} s while loading",
        "look at the log and the disk; a slow disk needs a larger load_timeout_s",
        permanent=False,
    )


def unresponsive_cause(silent_s: float) -> FailureCause:
    return FailureCause(
        "unresponsive",
        f"the engine was running, but did not answer for {silent_s:g} s",
        "look at the log; a device that hangs shows in `dmesg`",
        permanent=False,
    )


def spawn_failed(error: OSError, program: str) -> FailureCause:
    reason = error.strerror or str(error)
    if error.errno == errno.ENOENT:
        return FailureCause(
            "engine_missing",
            f"there is no program {program}",
            "`corral engine list` shows the engines that are found",
            permanent=True,
        )
    if error.errno in {errno.EACCES, errno.EPERM}:
        return FailureCause(
            "engine_denied",
            f"the engine {program} cannot be executed: {reason}",
            f"make it executable (chmod +x {program}), on a file system without noexec",
            permanent=True,
        )
    if error.errno == errno.ENOEXEC:
        return FailureCause(
            "engine_broken",
            f"{program} is not a program for this machine",
            "use a build for this system and processor (`corral engine list`)",
            permanent=True,
        )
    return FailureCause(
        "spawn_failed",
        f"the engine {program} could not be started: {reason}",
        "the machine may be out of memory, processes or files; see `ulimit -a`",
        permanent=False,
    )


def not_launchable(error: CorralError) -> FailureCause:
    hint = error.hint or "correct what it names, then `corral start`"
    is_permanent = not (_is_transient(error) or error.code in EXTERNAL)
    return FailureCause(error.code, error.message, hint, permanent=is_permanent)


def withdrawal_cause() -> FailureCause:
    return FailureCause(
        "stopped", "it was stopped before it began", "corral start starts it", permanent=False
    )


def internal(error: Exception) -> FailureCause:
    hint = "corral logs shows the traceback; the instance is restarted"
    return FailureCause(
        "internal", f"internal error of the daemon: {error!r}"[:_TEXT_MAX], hint, permanent=False
    )


def _is_transient(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _TRANSIENT:
            return True
        cause = cause.__cause__
    return False


def warnings(lines: Iterable[str]) -> tuple[FailureCause, ...]:
    """Return the features that an engine silently dropped at its start, in the order of output."""
    found: dict[str, FailureCause] = {}
    for line in lines:
        for pattern in WARNING_PATTERNS:
            if texts := pattern.read(line):
                found.setdefault(pattern.code, FailureCause(pattern.code, *texts, permanent=False))
    return tuple(found.values())


def _first(patterns: Sequence[LogPattern], lines: Sequence[str]) -> FailureCause | None:
    for line in lines:
        for pattern in patterns:
            if texts := pattern.read(line):
                return FailureCause(pattern.code, *texts, pattern.permanent)
    return None


# The engine's own prefix is seconds.millis.micros, then the level (Source: build 10434).
_ERROR_LINE: Final = re.compile(r"^(?:[\d.]+ )?E |\berror\b|\bfailed\b", re.IGNORECASE)


def _cause_of_exit(returncode: int | None, lines: Sequence[str]) -> FailureCause:
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    last = errors[-1].strip()[:_QUOTE_MAX] if errors else ""
    detail = f"; its last error: {last}" if last else ""
    if returncode == 0:
        return FailureCause(
            "left",
            "the engine ended by itself",
            "look for the reason in its log",
            permanent=False,
        )
    if returncode is not None and returncode < 0:
        return FailureCause(
            "signalled",
            f"the engine was ended by {signal_name(-returncode)}{detail}",
            "look at the log; the signal came from outside, or it crashed",
            permanent=False,
        )
    code = "" if returncode is None else f" with code {returncode}"
    return FailureCause(
        "exited", f"the engine ended{code}{detail}", "look at the log", permanent=False
    )


def signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
