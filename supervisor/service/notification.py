"""The messages of sd_notify(3). Pure.

Source: sd_notify(3) and systemd.service(5), `WatchdogSec=`, `NotifyAccess=`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_US_PER_S: Final = 1_000_000

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
PING: Final = "WATCHDOG=1"


def reloading(monotonic_ns: int) -> str:
    """`monotonic_ns` is of CLOCK_MONOTONIC; `READY` ends the reload."""
    return f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns // 1000}"


def status(text: str) -> str:
    return f"STATUS={' '.join(text.split())}"


def extend_timeout(by_s: float) -> str:
    """Ask for so much more time, from now, for the start, reload or stop that runs."""
    return f"EXTEND_TIMEOUT_USEC={int(by_s * _US_PER_S)}"


def watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Return after how long without `PING` the process is killed; None where it is not watched.

    Source: sd_watchdog_enabled(3).
    """
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    text = environ.get("WATCHDOG_USEC", "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(2**64))
    return int(text) / _US_PER_S or None if is_number else None
