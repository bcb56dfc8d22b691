"""Why an engine ended, how to fix it, and whether a restart can help.

Nearly every failure of llama-server is exit code 1, and its last output is rarely the reason: a
usage error is followed by the help text, a missing file by three lines that pass the error on. So
the first line that matches a row of the table `failure` decides. Two kinds of evidence come before
it: a signal that says enough by itself, and lines that name the file (the table `specific`). All
tables and texts are in `exit_cause.toml`.
"""

from __future__ import annotations

import errno
import functools
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from proxy.common.toml_text import table_beside
from supervisor.errors import CorralError

_TEXT_MAX: Final = 300
# Shortages that may end.
_TRANSIENT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
# Causes outside of the engine and its requests: an RPC worker is gone, or other programs hold the
# memory of a device. The instance waits for their end; they count against no engine or request.
EXTERNAL: Final = frozenset({"rpc_lost", "worker_unreachable", "device_memory_short"})


@dataclass(frozen=True, slots=True)
class FailureCause:
    code: str  # stable, in snake case
    sentence: str  # without a full stop
    hint: str  # how to fix it
    permanent: bool = True  # whether a restart without a change is useless

    def fill(self, texts: Mapping[str, object]) -> FailureCause:
        """Return the cause with values for the names in braces."""
        sentence, hint = self.sentence.format_map(texts), self.hint.format_map(texts)
        return replace(self, sentence=sentence, hint=hint)


Table = Literal["specific", "failure", "warning", "worker"]
_DECIDING: Final[tuple[Table, ...]] = ("specific", "failure")


@functools.cache
def _tables() -> Mapping[str, Any]:
    return table_beside(__file__)


@functools.cache
def patterns(table: Table) -> tuple[tuple[str, FailureCause], ...]:
    """Return the regular expressions of a table, each with its cause."""
    rows = [{**row} for row in _tables()[table]]
    found = (row.pop("pattern") for row in rows)
    texts = ("|".join(pattern) if isinstance(pattern, list) else pattern for pattern in found)
    return tuple((text, FailureCause(**row)) for text, row in zip(texts, rows, strict=True))


def known_cause(name: str, **texts: object) -> FailureCause:
    """Return a cause that no line of output tells."""
    return FailureCause(**_tables()["cause"][name]).fill(texts)


def find_causes(table: Table, lines: Iterable[str]) -> Iterator[FailureCause]:
    """Yield the causes of the lines that match a row of a table, in the order of the lines."""
    for line in lines:
        for pattern, cause in patterns(table):
            if found := re.search(pattern, line):
                groups = found.groupdict().items()
                yield cause.fill({name: (text or "").strip() for name, text in groups})


def diagnose(returncode: int | None, lines: Sequence[str]) -> FailureCause:
    """Find the cause in the last lines of output, oldest first; `returncode` may be unknown."""
    if returncode is not None and (name := _signal(returncode)) in _tables()["cause"]:
        return known_cause(name)
    found = (cause for table in _DECIDING for cause in find_causes(table, lines))
    return next(found, None) or _cause_of_exit(returncode, lines)


def has_aborted(lines: Sequence[str]) -> bool:
    """Return whether the engine stopped at its own assertion."""
    found = next(find_causes("failure", lines), None)
    return found is not None and found.code == "assertion"


def crash_cause(returncode: int, requests: int) -> FailureCause:
    """Return the cause of a crash during requests; ignores the log, which may quote clients."""
    by = signal_name(-returncode) if returncode < 0 else f"a signal (code {returncode})"
    many = "a request" if requests == 1 else f"{requests} requests"
    return known_cause("crashed_at_request", by=by, requests=many)


def spawn_failed(error: OSError, program: str) -> FailureCause:
    name = errno.errorcode.get(error.errno or 0, "")
    known = name if name in _tables()["cause"] else "spawn_failed"
    return known_cause(known, program=program, reason=error.strerror or str(error))


def not_launchable(error: CorralError) -> FailureCause:
    hint = error.hint or "correct what it names, then `corral start`"
    is_permanent = not (_is_transient(error) or error.code in EXTERNAL)
    return FailureCause(error.code, error.message, hint, permanent=is_permanent)


def internal(error: Exception) -> FailureCause:
    hint = "corral logs shows the traceback; the instance is restarted"
    text = f"internal error of the daemon: {error!r}"[:_TEXT_MAX]
    return FailureCause("internal", text, hint, permanent=False)


def _is_transient(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        error = error.__cause__
    return False


def warnings(lines: Sequence[str]) -> tuple[FailureCause, ...]:
    """Return the features that an engine silently dropped at its start, in the order of output."""
    found: dict[str, FailureCause] = {}
    for cause in find_causes("warning", lines):
        found.setdefault(cause.code, cause)
    return tuple(found.values())


# The engine's own prefix is seconds.millis.micros, then the level (Source: build 10434).
_ERROR_LINE: Final = re.compile(r"^(?:[\d.]+ )?E |\berror\b|\bfailed\b", re.IGNORECASE)


def _cause_of_exit(returncode: int | None, lines: Sequence[str]) -> FailureCause:
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    last = errors[-1].strip()[:200] if errors else ""
    detail = f"; its last error: {last}" if last else ""
    if returncode == 0:
        return known_cause("left")
    if returncode is not None and returncode < 0:
        return known_cause("signalled", by=signal_name(-returncode), detail=detail)
    how = "" if returncode is None else f" with code {returncode}"
    return known_cause("exited", how=how, detail=detail)


def signal_name(number: int) -> str:
    name = _signal(-number)
    return f"{name} (signal {number})" if name else f"signal {number}"


def _signal(returncode: int) -> str:
    """Return the name of the signal of a negative exit code; empty without one."""
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return ""
