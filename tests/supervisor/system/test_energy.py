import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.system import energy
from supervisor.system.energy import Energy


class Driver:
    """NVML of a machine with two devices; `failing` names the function that returns an error."""

    def __init__(self, failing: str = "", devices: int = 2) -> None:
        self._failing = failing
        self._devices = devices
        self._count_mj = 5000

    def __getattr__(self, function: str) -> Callable[..., int]:
        functions: dict[str, Callable[..., int]] = {
            "nvmlInit_v2": self._init,
            "nvmlDeviceGetCount_v2": self._count,
            "nvmlDeviceGetHandleByIndex_v2": self._handle,
            "nvmlDeviceGetTotalEnergyConsumption": self._energy,
        }
        return functions[function]

    def _init(self) -> int:
        return self._status("init", 9)

    def _count(self, count: Any) -> int:
        count._obj.value = self._devices
        return self._status("count", 1)

    def _handle(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return self._status("handle", 15)

    def _energy(self, handle: ctypes.c_void_p, energy: Any) -> int:
        energy._obj.value = self._count_mj * (1 if handle.value == 1 else 1000)
        self._count_mj += 500
        return self._status("energy", 3)

    def _status(self, what: str, error: int) -> int:
        return error if what == self._failing else 0


def _zone(
    root: Path, zone: str, name: str, uj: int | None, limit_uj: int = 262_143_328_850
) -> None:
    folder = root / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{limit_uj}\n")
    if uj is not None:
        (folder / "energy_uj").write_text(f"{uj}\n")


def _joules(before: Path, after: Path) -> float | None:
    return energy.energy_between(energy.read(before), energy.read(after)).processor_j


def test_packages_and_memory_are_summed_and_parts_of_a_package_are_not(tmp_path: Path) -> None:
    for when, factor in (("before", 1), ("after", 2)):
        root = tmp_path / when
        _zone(root, "intel-rapl:0", "package-0", factor * 10_000_000)
        _zone(root, "intel-rapl:0:0", "core", factor * 8_000_000)
        _zone(root, "intel-rapl:0:1", "dram", factor * 500_000)
        _zone(root, "intel-rapl:1", "package-1", factor * 20_000_000)
        _zone(root, "intel-rapl:2", "psys", factor * 90_000_000)
        _zone(root, "intel-rapl-mmio:0", "package-0", factor * 10_000_000)
    assert _joules(tmp_path / "before", tmp_path / "after") == 30.5


def test_a_counter_that_began_anew(tmp_path: Path) -> None:
    _zone(tmp_path / "before", "intel-rapl:0", "package-0", 99_000_000, limit_uj=100_000_000)
    _zone(tmp_path / "after", "intel-rapl:0", "package-0", 4_000_000, limit_uj=100_000_000)
    assert _joules(tmp_path / "before", tmp_path / "after") == 5


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert energy.read(tmp_path / "missing")[0] is None
    _zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    assert energy.read(tmp_path)[0] == {"intel-rapl:0": (1, 262_143.32885)}
    _zone(tmp_path, "intel-rapl:1", "package-1", None)
    assert energy.read(tmp_path)[0] is None


@pytest.mark.parametrize("text", ["", "many", "1 2"])
def test_a_counter_that_is_no_number_is_unknown(tmp_path: Path, text: str) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text(text)
    assert energy.read(tmp_path)[0] is None


def test_the_total_is_of_the_known_counters() -> None:
    none = None, None
    assert energy.energy_between(none, none) == Energy(None, None)
    assert (Energy(None, None).total_j, Energy(None, None).covers) == (None, "nothing")
    assert (Energy(2, 3).total_j, Energy(2, 3).covers) == (5, "processor and devices")
    assert (Energy(None, 3).total_j, Energy(None, 3).covers) == (3, "devices")
    appeared = {"intel-rapl:0": (1.0, 9.0)}, {"0": 1.0}
    assert energy.energy_between(none, appeared) == Energy(None, None)
    reloaded = None, {"0": 0.5}
    assert energy.energy_between(appeared, reloaded) == Energy(None, None)


def test_devices(tmp_path: Path) -> None:
    driver = Driver()
    before, after = (energy.read(tmp_path, driver) for _ in range(2))
    assert before[1] == {"0": 5.0, "1": 5500.0}
    assert energy.energy_between(before, after) == Energy(None, 1 + 1000)


@pytest.mark.parametrize("function", ["init", "count", "handle", "energy"])
def test_devices_that_cannot_be_read_are_unknown(function: str) -> None:
    assert energy.nvml_joules(Driver(function)) is None


def test_without_devices_their_energy_is_unknown() -> None:
    assert energy.nvml_joules(Driver(devices=0)) is None


def test_a_driver_without_the_functions_is_unknown() -> None:
    assert energy.nvml_joules(ctypes.CDLL(None)) is None
