"""Reads load, memory, temperature, power and throttling of the machine's accelerators.

NVIDIA's cards are read by NVML, those of AMD and Intel in sysfs, those of Macs in the I/O registry.
A figure that a driver does not give is None, never 0. Intel's drivers give counters of energy and
idle time in place of power and load, so they are read twice, and of a card's memory only what each
program holds.

A card that the system has suspended stays so: to read it would wake it. NVML is opened for
each reading, because a process that keeps it open keeps the card awake.

Sources: NVML API reference; Linux, Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst;
Documentation/ABI/testing/sysfs-driver-intel-{i915,xe}-hwmon; drivers/gpu/drm/xe/xe_gt_throttle.c
and xe_gt_idle.c; drivers/gpu/drm/i915/gt/intel_gt_sysfs_pm.c;
drivers/gpu/drm/amd/include/kgd_pp_interface.h (gpu_metrics_v1_3) and amdgpu_smu.h
(SMU_THROTTLER_*); ioreg(8).
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from supervisor.system.drm_clients import memory_by_card
from supervisor.system.limits import kernel_text

# Why a card computes more slowly than it could.
REASONS: Final = ("power", "temperature", "current", "hardware")
_COUNTERS: Final = {"energy_j", "idle_s"}
_DEVICES_MAX: Final = 64
_Figure = TypeVar("_Figure")


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The figures of one card for all programs; None is unknown."""

    id: str  # of the card, the same after a restart: its UUID, or its address on the bus
    name: str
    load: float | None = None  # share of the time in which it computed, 0 to 1
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None  # without what the driver keeps for itself
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttled: tuple[str, ...] | None = None  # of REASONS; empty if it runs as fast as it could
    energy_j: float | None = None  # a counter, from an arbitrary start
    idle_s: float | None = None  # a counter of the time in which it was powered down
    problem: str | None = None  # why it has no figures

    def figures(self) -> dict[str, object]:
        """Return the known facts, without the counters."""
        members = ((name, getattr(self, name)) for name in self.__slots__ if name not in _COUNTERS)
        return {name: value for name, value in members if value is not None}


# Counters grow each millisecond or more often.
_BETWEEN_S: Final = 0.1


def read_devices(
    root: Path = Path("/"),
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[DeviceReading]:
    """Read all cards. Blocks for milliseconds, 0.1 s for counters, or as long as a driver hangs."""
    cards = [*_read_drm(root)]
    if any(card.energy_j is not None or card.idle_s is not None for card in cards):
        began_s = clock()
        wait(_BETWEEN_S)
        cards = _with_rates(cards, [*_read_drm(root)], clock() - began_s)
    if any(map(_lacks_memory, cards)):
        held_bytes = memory_by_card(root)
        cards = [
            replace(card, memory_used_bytes=held_bytes.get(card.id))
            if _lacks_memory(card)
            else card
            for card in cards
        ]
    return [*_read_nvml(root), *cards, *_read_io_registry()]


def _lacks_memory(card: DeviceReading) -> bool:
    return card.memory_used_bytes is None and card.problem is None


def _with_rates(
    before: Sequence[DeviceReading], after: Sequence[DeviceReading], elapsed_s: float
) -> list[DeviceReading]:
    """Add load and power, as far as only counters are known, to the later readings."""
    old = {card.id: card for card in before}
    found = []
    for card in after:
        power_w, load = card.power_w, card.load
        if (earlier := old.get(card.id)) and power_w is None:
            power_w = _rate(earlier.energy_j, card.energy_j, elapsed_s)
        if earlier and (idle := _rate(earlier.idle_s, card.idle_s, elapsed_s)) is not None:
            load = max(0.0, 1 - idle)
        found.append(replace(card, power_w=power_w, load=load))
    return found


def _rate(before: float | None, after: float | None, elapsed_s: float) -> float | None:
    """Return the growth of a counter per second; None if it is unknown, or was reset."""
    if before is None or after is None or after < before:
        return None
    return (after - before) / elapsed_s


# NVIDIA.

_SUSPENDED: Final = "suspended"
_ASLEEP: Final = "it is suspended"
_NVIDIA: Final = "sys/bus/pci/drivers/nvidia"
_NVML: Final = {"win32": "nvml.dll"}.get(sys.platform, "libnvidia-ml.so.1")
# Of the reasons why clocks are low, those that are not by choice or for want of work.
# Source: nvml.h, nvmlClocksEventReason*.
_NVML_REASONS: Final = {"power": 0x4 | 0x80, "temperature": 0x20 | 0x40, "hardware": 0x8}


@functools.cache
def load_nvml() -> Any | None:
    """Return the module `pynvml`; None without the driver's library, to save 5 MB of memory."""
    try:
        ctypes.CDLL(_NVML)
    except OSError:
        return None
    import pynvml  # noqa: PLC0415 (only beside the library)

    return pynvml


def _read_nvml(root: Path) -> Iterator[DeviceReading]:
    cards = list((root / _NVIDIA).glob("*:*/power/runtime_status"))
    if cards and {kernel_text(card) for card in cards} == {_SUSPENDED}:
        for card in cards:
            yield DeviceReading(card.parent.parent.name, "NVIDIA", problem=_ASLEEP)
    elif nvml := load_nvml():
        with suppress(nvml.NVMLError):  # the driver is not loaded, or not the library's
            nvml.nvmlInit()
            try:
                for index in range(min(nvml.nvmlDeviceGetCount(), _DEVICES_MAX)):
                    yield _nvml_device(nvml, index)
            finally:
                nvml.nvmlShutdown()


def _nvml_device(nvml: Any, index: int) -> DeviceReading:
    problems: list[str] = []

    def figure(read: Callable[[], _Figure]) -> _Figure | None:
        try:
            return read()
        except nvml.NVMLError as error:
            if error.value in {nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED}:
                problems.append(str(error))
        return None

    handle = figure(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return DeviceReading(f"nvidia{index}", "NVIDIA", problem=next(iter(problems), "no access"))
    # The second version counts memory that the driver keeps for itself as neither used nor free.
    memory = figure(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2))
    memory = memory or figure(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    mask = figure(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    sensor = nvml.NVML_TEMPERATURE_GPU
    return DeviceReading(
        id=figure(lambda: str(nvml.nvmlDeviceGetUUID(handle))) or f"nvidia{index}",
        name=figure(lambda: str(nvml.nvmlDeviceGetName(handle))) or "NVIDIA",
        load=figure(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        memory_used_bytes=memory.used if memory else None,
        memory_total_bytes=memory.total if memory else None,
        memory_free_bytes=memory.free if memory else None,
        temperature_c=figure(lambda: float(nvml.nvmlDeviceGetTemperature(handle, sensor))),
        power_w=figure(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        power_limit_w=figure(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
        throttled=None if mask is None else _reasons_of(mask, _NVML_REASONS),
        energy_j=figure(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
        problem=next(iter(problems), None),
    )


def _reasons_of(mask: int, bits: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(reason for reason in REASONS if mask & bits.get(reason, 0))


# AMD and Intel.

_DRIVERS: Final = {"amdgpu": "AMD", "i915": "Intel", "xe": "Intel"}
# In gpu_metrics_v1_3, which is of 120 bytes: the reasons in the same form for all cards.
_AMD_METRICS: Final = (120, 1, 3)
_AMD_REASONS_AT: Final = 112
_AMD_REASONS: Final = {"power": 0xFFFF, "current": 0xFFFF << 16, "temperature": 0xFFFF << 32}


def _read_drm(root: Path) -> Iterator[DeviceReading]:
    cards = (root / "sys/class/drm").glob("card[0-9]*")
    for card in sorted(cards)[:_DEVICES_MAX]:
        lines = kernel_text(card / "device/uevent").splitlines()
        facts = dict(line.split("=", 1) for line in lines if "=" in line)
        # Connectors are named like their card, but `device` is its node there, without a driver.
        if maker := _DRIVERS.get(facts.get("DRIVER", "")):
            yield _drm_device(card, facts, maker)


def _drm_device(card: Path, facts: Mapping[str, str], maker: str) -> DeviceReading:
    device, driver = card / "device", facts["DRIVER"]
    model = facts.get("PCI_ID", "").rpartition(":")[2]
    found = DeviceReading(
        id=facts.get("PCI_SLOT_NAME", card.name),
        name=kernel_text(device / "product_name") or f"{maker} {model}".strip(),
    )
    if kernel_text(device / "power/runtime_status") == _SUSPENDED:
        return replace(found, problem=_ASLEEP)
    # A graphics engine has sensors beside those of the card.
    hwmons = [path for path in device.glob("hwmon/*") if kernel_text(path / "name") == driver]
    hwmon = hwmons[0] if hwmons else device / "hwmon"
    used, total = (_whole(device / f"mem_info_vram_{name}") for name in ("used", "total"))
    return replace(
        found,
        load=_number(1e-2, device / "gpu_busy_percent"),
        memory_used_bytes=used,
        memory_total_bytes=total,
        memory_free_bytes=None if used is None or total is None else total - used,
        # xe has the package as its second sensor, and no first one.
        temperature_c=_number(1e-3, hwmon / "temp1_input", hwmon / "temp2_input"),
        power_w=_number(1e-6, hwmon / "power1_average", hwmon / "power1_input"),
        # 0: the limit is off.
        power_limit_w=_number(1e-6, hwmon / "power1_cap", hwmon / "power1_max") or None,
        throttled=_amd_reasons(device) if driver == "amdgpu" else _intel_reasons(card),
        energy_j=_number(1e-6, hwmon / "energy1_input", hwmon / "energy2_input"),
        idle_s=_number(
            1e-3,
            card / "gt/gt0/rc6_residency_ms",
            device / "tile0/gt0/gtidle/idle_residency_ms",
        ),
    )


def _number(unit: float, *files: Path) -> float | None:
    """Return the number in the first of the files that has one, times `unit`."""
    found = next((number for file in files if (number := _whole(file)) is not None), None)
    return None if found is None else found * unit


def _whole(file: Path) -> int | None:
    text = kernel_text(file)
    return int(text) if text.isdecimal() else None


def _amd_reasons(device: Path) -> tuple[str, ...] | None:
    try:
        table = (device / "gpu_metrics").read_bytes()
    except OSError:
        return None
    size, version = int.from_bytes(table[:2], "little"), (*table[2:4],)
    if (size, *version) != _AMD_METRICS or len(table) < size:
        return None
    mask = int.from_bytes(table[_AMD_REASONS_AT:size], "little")
    return _reasons_of(mask, _AMD_REASONS)


def _intel_reasons(card: Path) -> tuple[str, ...] | None:
    files = [
        *card.glob("gt/gt*/throttle_reason_*"),
        *card.glob("device/tile*/gt*/freq0/throttle/reason_*"),
    ]
    if not files:
        return None
    active = {_intel_reason(file.name) for file in files if kernel_text(file) == "1"}
    return tuple(reason for reason in REASONS if reason in active)


def _intel_reason(name: str) -> str:
    """Return the reason of a file, "" for that of any reason: reason_pl1, reason_vr_thermalert."""
    if name.endswith("_status"):
        return ""
    if any(word in name for word in ("therm", "prochot", "ratl")):
        return "temperature"
    return "power" if any(word in name for word in ("_pl", "psys")) else "current"


# Macs.

_IOREG: Final = ("/usr/sbin/ioreg", "-a", "-r", "-d", "1", "-c", "IOAccelerator")
_IOREG_LIMIT_S: Final = 2.0


def _read_io_registry() -> Iterable[DeviceReading]:
    if not Path(_IOREG[0]).exists():
        return ()
    try:
        done = subprocess.run(_IOREG, capture_output=True, timeout=_IOREG_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_io_registry(done.stdout)


def parse_io_registry(text: bytes) -> list[DeviceReading]:
    """Parse accelerators; the memory of Apple's own is main memory, so it has no total.

    Power and temperature of Apple's own are only for root.
    """
    import plistlib  # noqa: PLC0415 (only on Macs, with its parser)
    from xml.parsers.expat import ExpatError  # noqa: PLC0415

    try:
        found = plistlib.loads(text)
    except (ValueError, ExpatError):
        return []
    return [
        _mac_device(index, entry)
        for index, entry in enumerate(found if isinstance(found, list) else [])
        if isinstance(entry, dict)
    ]


def _mac_device(index: int, entry: Mapping[str, Any]) -> DeviceReading:
    model, figures = entry.get("model"), entry.get("PerformanceStatistics") or {}

    def number(name: str) -> float | None:
        value = figures.get(name)
        return value if isinstance(value, int | float) else None

    load, used = number("Device Utilization %"), number("vramUsedBytes")
    free, shared = number("vramFreeBytes"), number("In use system memory")
    memory = shared if used is None else used
    return DeviceReading(
        id=f"gpu{index}",
        name=model if isinstance(model, str) else str(entry.get("IOClass", "GPU")),
        load=None if load is None else load / 100,
        memory_used_bytes=None if memory is None else int(memory),
        memory_total_bytes=None if used is None or free is None else int(used + free),
        memory_free_bytes=None if free is None else int(free),
        temperature_c=number("Temperature(C)"),
        power_w=number("Total Power(W)"),
    )
