"""Measures the energy that the processor (RAPL) and devices used.

Both count in hardware, for the whole machine, so other programs' energy is included. A counter that
cannot be read is unknown, not zero: since Linux 5.10 only root may read RAPL, because the counter
reveals the work of other programs. NVIDIA's cards count from Volta on, and Intel's; AMD's do not.
Source: CVE-2020-8694; Documentation/power/powercap/powercap.rst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.system.devices import DeviceReading, read_devices

_POWERCAP: Final = Path("/sys/class/powercap")
_MICROJOULES: Final = 1e6


# A counter of joules, and the value after which it begins at 0 again.
Counter = tuple[float, float]


# Counters of the processor and of devices, by name; None without any, or if one of the processor's
# cannot be read.
EnergyReading = tuple[Mapping[str, Counter] | None, Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules between two readings; None is unknown."""

    processor_j: float | None  # the sum of all processor packages, and of memory if it is counted
    devices_j: float | None  # the sum of all devices that count it

    @property
    def total_j(self) -> float | None:
        """The sum of the known values; None if there are none."""
        known = [joules for joules in (self.processor_j, self.devices_j) if joules is not None]
        return sum(known) if known else None

    @property
    def covers(self) -> str:
        parts = (("processor", self.processor_j), ("devices", self.devices_j))
        return " and ".join(name for name, joules in parts if joules is not None) or "nothing"


def read(
    powercap: Path = _POWERCAP, read_devices: Callable[[], Iterable[DeviceReading]] = read_devices
) -> EnergyReading:
    """Read all counters.

    Two readings must be less than one counter range apart: 262,144 J on most processors, which is
    20 minutes at 200 W.
    """
    counters = {
        device.id: device.energy_j for device in read_devices() if device.energy_j is not None
    }
    return _processor(powercap), counters or None


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
