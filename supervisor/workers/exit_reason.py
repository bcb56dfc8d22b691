"""Why a worker on this machine does not run, and whether a restart can help. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from supervisor.process.child import Exit
from supervisor.process.exit_cause import FailureCause, signal_name
from supervisor.process.exit_patterns import LogPattern
from supervisor.workers.address import WorkerAddress

_OTHER_PORT: Final = (
    "name another port, or 0 for any; `ip address` lists the addresses of this machine"
)
# Source: tools/rpc/rpc-server.cpp and ggml-rpc.cpp, build 10434. The exit code says nothing: a
# worker that cannot listen ends with 0.
_PATTERNS: Final = (
    LogPattern(
        "device_unknown",
        r"error: unknown device: (?P<device>.+)",
        "there is no device {device} here",
        "`corral engine list` shows the devices; its own log lists them too",
    ),
    LogPattern(
        "port_in_use",
        r"Failed to create server socket",
        "it cannot listen: the port is taken, or the address is not this machine's",
        _OTHER_PORT,
        permanent=False,
    ),
    LogPattern(
        "device_missing",
        r"^No devices found",
        "it found no device to compute on",
        "use an engine with a CPU library (`corral engine list`)",
    ),
)


def exit_reason(end: Exit, lines: Sequence[str]) -> FailureCause:
    """Find the reason in the last lines of output, oldest first."""
    for line in lines:
        for pattern in _PATTERNS:
            if texts := pattern.read(line):
                return FailureCause(pattern.code, *texts, pattern.permanent)
    return FailureCause("exited", _how(end), "look at its log", permanent=False)


def not_listening(address: WorkerAddress, error: OSError) -> FailureCause:
    return FailureCause(
        "port_in_use",
        f"it cannot listen on {address}: {(error.strerror or str(error)).lower()}",
        _OTHER_PORT,
        permanent=False,
    )


def never_listened(limit_s: float) -> FailureCause:
    return FailureCause(
        "unresponsive",
        f"it did not answer within {limit_s:g} s",
        "look at its log; a GPU driver may be stuck",
        permanent=False,
    )


def _how(end: Exit) -> str:
    if end.signal is None:
        return f"it ended with code {end.code}"
    return f"it was ended by {signal_name(end.signal)}"
