"""Measures the energy that the processor (RAPL) and NVIDIA devices (NVML) used.

Both count in hardware, for the whole machine, so other programs' energy is included. A counter that
cannot be read is unknown, not zero: since Linux 5.10 only root may read RAPL, because the counter
reveals the work of other programs. Source: CVE-2020-8694;
Documentation/power/powercap/powercap.rst.

NVML's four functions are called in the driver's own library, because a Python package for them
would be installed on machines without a device too. Source: NVML API reference,
nvmlDeviceGetTotalEnergyConsumption (mJ since the driver was loaded; Volta or newer).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LIBRARY: Final = "libnvidia-ml.so.1"
_OK: Final = 0


# NVML, whose functions return 0 on success.
Library = Any


@functools.cache
def load_nvml() -> Library | None:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def nvml_joules(nvml: Library) -> Mapping[str, float] | None:
    """Read the counter of each device; None without devices, or if one cannot be read."""
    try:
        count = ctypes.c_uint()
        # Repeated calls are fine: the library counts its users.
        if nvml.nvmlInit_v2() != _OK or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
            return None
        values = [_joules_of(nvml, i) for i in range(min(count.value, 64))]
    except AttributeError:  # a driver too old for one of the functions
        return None
    known = {str(i): value for i, value in enumerate(values) if value is not None}
    return known if known and len(known) == len(values) else None


def _joules_of(nvml: Library, index: int) -> float | None:
    handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != _OK:
        return None
    if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)) != _OK:
        return None
    return energy.value / 1e3


_POWERCAP: Final = Path("/sys/class/powercap")
_MICROJOULES: Final = 1e6


# A counter of joules, and the value after which it begins at 0 again.
Counter = tuple[float, float]


# Counters of the processor and of devices, by name; None without any, or if one cannot be read.
EnergyReading = tuple[Mapping[str, Counter] | None, Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules between two readings; None is unknown."""

    processor_j: float | None  # the sum of all processor packages, and of memory if it is counted
    devices_j: float | None  # the sum of all NVIDIA devices

    @property
    def total_j(self) -> float | None:
        """The sum of the known values; None if there are none."""
        known = [joules for joules in (self.processor_j, self.devices_j) if joules is not None]
        return sum(known) if known else None

    @property
    def covers(self) -> str:
        parts = (("processor", self.processor_j), ("devices", self.devices_j))
        return " and ".join(name for name, joules in parts if joules is not None) or "nothing"


def read(powercap: Path = _POWERCAP, device_library: Library | None = None) -> EnergyReading:
    """Read all counters.

    Two readings must be less than one counter range apart: 262,144 J on most processors, which is
    20 minutes at 200 W.
    """
    library = device_library or load_nvml()
    return _processor(powercap), nvml_joules(library) if library else None


def energy_between(before: EnergyReading, after: EnergyReading) -> Energy:
    processor_j = devices_j = None
    (old, devices_before), (new, devices) = before, after
    if old and new and old.keys() == new.keys():
        grown = [(value_j - old[name][0], range_j) for name, (value_j, range_j) in new.items()]
        processor_j = sum(grown_j + (range_j if grown_j < 0 else 0) for grown_j, range_j in grown)
    if devices_before and devices and devices_before.keys() == devices.keys():
        passed = [value - devices_before[name] for name, value in devices.items()]
        # A counter falls if the driver was reloaded in between.
        devices_j = sum(passed) if min(passed) >= 0 else None
    return Energy(processor_j, devices_j)


def _processor(powercap: Path) -> Mapping[str, Counter] | None:
    """Read the packages and the memory; cores and graphics are parts of a package.

    Other zones are left out: `psys` counts the packages again, and `intel-rapl-mmio` shows the same
    counters again. Source: drivers/powercap/intel_rapl_common.c.
    """
    counters = {}
    try:
        for zone in sorted(powercap.glob("intel-rapl:*")):
            name = (zone / "name").read_text("utf-8").strip()
            if name.startswith("package") or name == "dram":
                value = int((zone / "energy_uj").read_text("utf-8"))
                limit = int((zone / "max_energy_range_uj").read_text("utf-8"))
                counters[zone.name] = value / _MICROJOULES, limit / _MICROJOULES
    except (OSError, ValueError):
        return None
    return counters or None
