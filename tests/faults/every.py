"""The list of faults, and the reason for each absent one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from faults.devices import DEVICES
from faults.fault import Fault
from faults.http import HTTP
from faults.process import PROCESS
from faults.resources import RESOURCES
from faults.security import SECURITY
from faults.slot_files import SLOT_FILES
from faults.upstream import UPSTREAM

EVERY: Final[tuple[Fault, ...]] = tuple(
    sorted(
        [
            *PROCESS.entries,
            *RESOURCES.entries,
            *DEVICES.entries,
            *HTTP.entries,
            *UPSTREAM.entries,
            *SECURITY.entries,
            *SLOT_FILES.entries,
        ],
        key=lambda fault: fault.number,
    )
)

ABSENT: Final[Mapping[int, str]] = MappingProxyType(
    {
        30: "setting the clock needs rights; ruff bans time.time, so nothing waits by wall clock",
    }
)
