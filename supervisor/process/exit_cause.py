"""Says why an engine ended, what to do about it, and whether trying again can help. Pure.

Nearly every failure of llama-server is exit code 1, and what it prints last is seldom the reason:
a usage error is followed by help, a missing file by three lines that only pass the error on. So the
first line that matches a row of `marks.MARKS` decides, in the order in which the engine wrote. Two
kinds of evidence go before it: a signal that says enough alone (`SIGNALS`), and lines that name
which of several files was meant (`marks.TELLING`).
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.errors import CorralError
from supervisor.process.exit_patterns import (
    FAILURE_PATTERNS,
    SPECIFIC_PATTERNS,
    WARNING_PATTERNS,
    LogPattern,
)

_QUOTE_MAX: Final = 200
_TEXT_MAX: Final = 300
# What there is too little of at the moment.
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why an instance is not serving.

    Attributes:
        code: Stable name in snake case.
        sentence: What happened, without a full stop.
        hint: What to do next.
        permanent: Whether trying again without a change is useless.
    """

    code: str
    sentence: str
    hint: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class StartWarning:
    """Something an engine silently went without.

    Attributes:
        code: Stable name in snake case.
        sentence: What it goes without, without a full stop.
        hint: What to do about it.
    """

    code: str
    sentence: str
    hint: str


# Signals that say enough alone, whatever the log says.
SIGNALS: Final[Mapping[int, FailureCause]] = MappingProxyType(
    {
        signal.SIGILL: FailureCause(
            "illegal_instruction",
            "the engine was built for another processor: it met an instruction this one lacks",
            "use a build for this processor, or try no-repack; `corral engine list` shows others",
            permanent=True,
        ),
        signal.SIGSEGV: FailureCause(
            "memory_fault",
            "the engine crashed with a memory fault",
            "on processors with AMX some builds fault at their first token: try no-repack",
            permanent=False,
        ),
        signal.SIGBUS: FailureCause(
            "model_changed",
            "the engine could not read memory that a file stands behind",
            "most likely the model's file changed or shrank while in use: put it back whole",
            permanent=False,
        ),
        signal.SIGFPE: FailureCause(
            "arithmetic_fault",
            "the engine crashed with an arithmetic fault",
            "the model's header may be wrong (`corral model show FILE`), or try another build",
            permanent=False,
        ),
        signal.SIGKILL: FailureCause(
            "killed",
            "the engine was killed from outside (signal 9)",
            "most often the kernel, out of memory: see `dmesg`; lower ctx-size or use low-memory",
            permanent=False,
        ),
    }
)


def diagnose(returncode: int | None, lines: Sequence[str]) -> FailureCause:
    """Say why an engine ended.

    Args:
        returncode: Exit code, or minus the number of the signal that ended it, as `subprocess`
            gives it. None when it is not known.
        lines: What the engine wrote last, oldest first.
    """
    if returncode is not None and (known := SIGNALS.get(-returncode)):
        return known
    return (
        _first(SPECIFIC_PATTERNS, lines)
        or _first(FAILURE_PATTERNS, lines)
        or _by_exit(returncode, _last_error(lines))
    )


def crashed(returncode: int, requests: int) -> FailureCause:
    """Return the cause of an engine that crashed while it computed clients' requests.

    Its log is not asked: clients' texts stand there.

    Args:
        returncode: As for `diagnose`.
        requests: How many they were, at least 1.
    """
    by = _signal_name(-returncode) if returncode < 0 else f"a signal (code {returncode})"
    many = "a request" if requests == 1 else f"{requests} requests"
    return FailureCause(
        "crashed_at_request",
        f"the engine was ended by {by} while it computed {many}",
        "`upstream.failed` in the daemon's log names them; one that crashes two engines is refused",
        permanent=False,
    )


def load_timeout(silent_s: float) -> FailureCause:
    """Return the cause of an engine that gave no sign of life while loading."""
    return FailureCause(
        "load_stalled",
        f"the engine gave no sign of life for {silent_s:g} s while loading",
        "look at the log and the disk; a slow disk needs a larger load_timeout_s",
        permanent=False,
    )


def unresponsive(silent_s: float) -> FailureCause:
    """Return the cause of an engine that was up and stopped answering."""
    return FailureCause(
        "unresponsive",
        f"the engine was up, but did not answer for {silent_s:g} s",
        "look at the log; a device that hangs shows in `dmesg`",
        permanent=False,
    )


def spawn_failed(error: OSError, program: str) -> FailureCause:
    """Return the cause of an engine that could not even be spawned."""
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
            f"the engine {program} may not be run: {reason}",
            f"make it executable (chmod +x {program}), on a file system without noexec",
            permanent=True,
        )
    if error.errno == errno.ENOEXEC:
        return FailureCause(
            "engine_broken",
            f"{program} is no program for this machine",
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
    """Return the cause of a run that failed before anything could be spawned."""
    hint = error.hint or "correct what it names, then `corral start`"
    return FailureCause(error.code, error.message, hint, permanent=not _is_passing(error))


def internal(error: Exception) -> FailureCause:
    """Return the cause of a run that an error of the daemon itself ended."""
    hint = "corral logs shows the traceback; it is tried again"
    return FailureCause(
        "internal", f"the daemon met an error: {error!r}"[:_TEXT_MAX], hint, permanent=False
    )


def _is_passing(error: BaseException) -> bool:
    """Return whether an error comes from a want of descriptors or memory, which may end."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return True
        cause = cause.__cause__
    return False


def warnings(lines: Iterable[str]) -> tuple[StartWarning, ...]:
    """Return what a ready engine silently went without, each once, in the order it said so."""
    found: dict[str, StartWarning] = {}
    for line in lines:
        for mark in WARNING_PATTERNS:
            if said := mark.read(line):
                found.setdefault(mark.code, StartWarning(mark.code, *said))
    return tuple(found.values())


def _first(marks: Sequence[LogPattern], lines: Sequence[str]) -> FailureCause | None:
    for line in lines:
        for mark in marks:
            if said := mark.read(line):
                return FailureCause(mark.code, *said, mark.permanent)
    return None


# The engine's own prefix is seconds.millis.micros, then the level (Source: build 10434).
_ERROR_LINE: Final = re.compile(r"^(?:[\d.]+ )?E |\berror\b|\bfailed\b", re.IGNORECASE)


def _last_error(lines: Sequence[str]) -> str:
    """Return the last line that sounds like an error, for causes nobody knows yet."""
    wrong = [line for line in lines if _ERROR_LINE.search(line)]
    return wrong[-1].strip()[:_QUOTE_MAX] if wrong else ""


def _by_exit(returncode: int | None, last: str) -> FailureCause:
    said = f"; it last said: {last}" if last else ""
    if returncode == 0:
        return FailureCause(
            "left",
            "the engine ended by itself",
            "look at the log for who asked it to",
            permanent=False,
        )
    if returncode is not None and returncode < 0:
        return FailureCause(
            "signalled",
            f"the engine was ended by {_signal_name(-returncode)}{said}",
            "look at the log; sent from outside, or a crash of its own",
            permanent=False,
        )
    code = "" if returncode is None else f" with code {returncode}"
    return FailureCause(
        "exited", f"the engine ended{code}{said}", "look at the log", permanent=False
    )


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
