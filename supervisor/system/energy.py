"""Energy that the processor (RAPL) and the devices (NVML) used between two readings.

Energy counters of NVIDIA devices, by the library that the driver brings. Four functions, called
directly: a package for them would be installed on every machine without a device too. Source: NVML
API reference, nvmlDeviceGetTotalEnergyConsumption (mJ since the driver was loaded; Volta or newer).

Both count energy in hardware, for the whole machine: other programs' work is in it. What cannot be
read is unknown, not zero; Linux lets only root read RAPL since 5.10, because the counter reveals
what other programs compute. Source: CVE-2020-8694; Documentation/power/powercap/powercap.rst.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

_LIBRARY: Final = "libnvidia-ml.so.1"
_DEVICES_MAX: Final = 64
_MILLIJOULES: Final = 1e3
_OK: Final = 0


class Library(Protocol):
    """NVML, whose functions return 0 on success."""

    def __getattr__(self, function: str) -> Callable[..., int]: ...


@functools.cache
def load_nvml() -> Library | None:
    """Load the library; None without a driver."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def nvml_joules(nvml: Library) -> Mapping[str, float] | None:
    """Read the counter of each device; None without devices, or if one cannot be read."""
    try:
        count = ctypes.c_uint()
        # May be called often: the library counts its users.
        if nvml.nvmlInit_v2() != _OK or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
            return None
        values = [_joules_of(nvml, i) for i in range(min(count.value, _DEVICES_MAX))]
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
    return energy.value / _MILLIJOULES


_POWERCAP: Final = Path("/sys/class/powercap")
_MICROJOULES: Final = 1e6


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter of joules; after `range_j` it begins at 0 again."""

    value_j: float
    range_j: float


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Counters by name; None where there are none, or not all of them can be read."""

    processor: Mapping[str, Counter] | None
    devices: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules between two readings; None is unknown.

    Attributes:
        processor_j: Of all processor packages, and of memory where it is counted.
        devices_j: Of all NVIDIA devices.
    """

    processor_j: float | None
    devices_j: float | None

    @property
    def total_j(self) -> float | None:
        """The sum of what is known; None if nothing is."""
        known = [
            energy_j for energy_j in (self.processor_j, self.devices_j) if energy_j is not None
        ]
        return sum(known) if known else None

    @property
    def covers(self) -> str:
        """What the total is of, in words."""
        parts = (("processor", self.processor_j), ("devices", self.devices_j))
        return " and ".join(name for name, joules in parts if joules is not None) or "nothing"


def read(powercap: Path = _POWERCAP, device_library: Library | None = None) -> EnergyReading:
    """Read all counters.

    A difference is right if the readings are less than one round of a counter apart: 262,144 J on
    most processors, which is 20 minutes at 200 W.
    """
    library = device_library or load_nvml()
    return EnergyReading(_processor(powercap), nvml_joules(library) if library else None)


def energy_between(before: EnergyReading, after: EnergyReading) -> Energy:
    return Energy(
        _processor_joules(before.processor, after.processor),
        _device_joules(before.devices, after.devices),
    )


def _processor(powercap: Path) -> Mapping[str, Counter] | None:
    """Read the packages, and the memory beside them; cores and graphics are parts of a package.

    Zones of another kind are left out: `psys` counts the packages once more, and `intel-rapl-mmio`
    is a second way to the same counters. Source: drivers/powercap/intel_rapl_common.c.
    """
    try:
        zones = {zone.name: zone for zone in powercap.glob("intel-rapl:*") if _is_counted(zone)}
        counters = {name: _counter(zone) for name, zone in sorted(zones.items())}
    except (OSError, ValueError):
        return None
    return counters or None


def _is_counted(zone: Path) -> bool:
    name = (zone / "name").read_text("utf-8").strip()
    return name.startswith("package") or name == "dram"


def _counter(zone: Path) -> Counter:
    value, limit = (
        int((zone / name).read_text("utf-8")) for name in ("energy_uj", "max_energy_range_uj")
    )
    return Counter(value / _MICROJOULES, limit / _MICROJOULES)


def _processor_joules(
    before: Mapping[str, Counter] | None, after: Mapping[str, Counter] | None
) -> float | None:
    if before is None or after is None or before.keys() != after.keys():
        return None
    return sum(_counter_difference(before[name], counter) for name, counter in after.items())


def _counter_difference(before: Counter, after: Counter) -> float:
    passed = after.value_j - before.value_j
    return passed if passed >= 0 else passed + after.range_j


def _device_joules(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> float | None:
    if before is None or after is None or before.keys() != after.keys():
        return None
    passed = [value - before[name] for name, value in after.items()]
    # The driver was reloaded in between.
    return None if min(passed) < 0 else sum(passed)
