from pathlib import Path

import pytest
from support import nvml_library
from support.nvml_library import Library

from supervisor.system import energy
from supervisor.system.energy import Energy


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


def test_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_library.install(monkeypatch, Library(cards=2))
    before, after = (energy.read(tmp_path) for _ in range(2))
    assert before[1] == {"GPU-0": 5.0, "GPU-1": 5500.0}
    assert energy.energy_between(before, after) == Energy(None, 1 + 1000)


def test_the_energy_of_devices_that_do_not_count_it_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_library.install(monkeypatch, Library(fault="TotalEnergyConsumption"))
    assert energy.read(tmp_path) == (None, None)
