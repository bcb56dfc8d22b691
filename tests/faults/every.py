"""The list of faults, and those of it that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from faults.fault import Fault
from faults.process import PROCESS
from faults.resources import RESOURCES

EVERY: Final[tuple[Fault, ...]] = tuple(
    sorted([*PROCESS.entries, *RESOURCES.entries], key=lambda fault: fault.number)
)

ABSENT: Final[Mapping[int, str]] = MappingProxyType(
    {
        23: "slot files do not exist yet",
        30: "setting the clock needs rights; no source waits by the wall clock, which a test holds",
    }
)
