"""Readings of cards: by NVIDIA's library, in sysfs, and in the I/O registry of Macs."""

import plistlib
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support import nvml_library
from support.nvml_library import GPU_IS_LOST, MIB, NOT_LOADED, Library

from supervisor.system import devices
from supervisor.system.devices import DeviceReading, parse_io_registry, read_devices

TREES: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("device_trees.toml").read_text("utf-8")
)


def write(root: Path, tree: str) -> Path:
    for name, text in TREES[tree].items():
        path = root / "sys/class/drm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text.strip()}\n", "utf-8")
    return root


def hold(root: Path, address: str) -> None:
    """Have a program hold 3 MiB of a card."""
    descriptors = root / "proc/10"
    (descriptors / "fd").mkdir(parents=True)
    (descriptors / "fd/5").symlink_to("/dev/dri/renderD128")
    (descriptors / "fdinfo").mkdir()
    facts = f"drm-client-id: 3\ndrm-pdev: {address}\ndrm-resident-vram0: 3 MiB\n"
    (descriptors / "fdinfo/5").write_text(facts, "utf-8")


H100 = DeviceReading(
    "GPU-0",
    "NVIDIA H100 80GB HBM3",
    load=0.43,
    memory_used_bytes=20_000 * MIB,
    memory_total_bytes=81_559 * MIB,
    memory_free_bytes=61_059 * MIB,  # 500 MiB are the driver's own
    temperature_c=61,
    power_w=312.4,
    power_limit_w=700,
    throttled=("power",),
    energy_j=5.0,
)


def test_a_card_of_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(cards=2)
    nvml_library.install(monkeypatch, library)
    first, second = read_devices(tmp_path)
    assert first == H100
    assert second.id == "GPU-1"
    assert not library.is_open  # an open library would keep the card awake


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("UtilizationRates", replace(H100, load=None)),
        ("Temperature", replace(H100, temperature_c=None)),
        ("PowerUsage", replace(H100, power_w=None)),
        ("EnforcedPowerLimit", replace(H100, power_limit_w=None)),
        ("CurrentClocksThrottleReasons", replace(H100, throttled=None)),
        ("TotalEnergyConsumption", replace(H100, energy_j=None)),
    ],
)
def test_a_figure_that_a_card_does_not_support_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, expected: DeviceReading
) -> None:
    nvml_library.install(monkeypatch, Library(fault=function))
    assert read_devices(tmp_path) == [expected]


def test_an_older_driver_tells_the_memory_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_library.install(monkeypatch, Library(missing="nvmlDeviceGetMemoryInfo_v2"))
    assert read_devices(tmp_path) == [replace(H100, memory_used_bytes=20_500 * MIB)]


def test_a_lost_card_has_its_problem_and_the_others_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "GPU is lost"
    nvml_library.install(monkeypatch, Library(cards=2, fault="all", error=GPU_IS_LOST))
    assert read_devices(tmp_path) == [H100, DeviceReading("nvidia1", "NVIDIA", problem=lost)]
    # It was lost after its handle was got.
    nvml_library.install(monkeypatch, Library(fault="PowerUsage", error=GPU_IS_LOST))
    assert read_devices(tmp_path) == [replace(H100, power_w=None, problem=lost)]


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "Count_v2"])
def test_without_its_driver_nvidias_library_has_no_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    nvml_library.install(monkeypatch, Library(fault=function, error=NOT_LOADED))
    assert read_devices(tmp_path) == []


def test_a_suspended_card_of_nvidia_is_not_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "sys/bus/pci/drivers/nvidia/0000:01:00.0/power/runtime_status"
    status.parent.mkdir(parents=True)
    status.write_text("suspended\n", "utf-8")
    monkeypatch.setattr(devices, "load_nvml", lambda: pytest.fail("it was woken"))
    asleep = DeviceReading("0000:01:00.0", "NVIDIA", problem="it is suspended")
    assert read_devices(tmp_path) == [asleep]


def test_a_machine_without_cards(tmp_path: Path) -> None:
    assert read_devices(tmp_path) == []
    assert read_devices(write(tmp_path, "others")) == []


RADEON = DeviceReading(
    "0000:03:00.0",
    "AMD 744C",
    load=0.87,
    memory_used_bytes=18_253_611_008,
    memory_total_bytes=25_753_026_560,
    memory_free_bytes=7_499_415_552,
    temperature_c=68,
    power_w=301,
    power_limit_w=339,
)


def metrics_table(size: int, revision: int, reasons: int) -> bytes:
    """Return gpu_metrics_v1_REVISION with these reasons."""
    head = size.to_bytes(2, "little") + bytes((1, revision))
    return head + bytes(size - 12) + reasons.to_bytes(8, "little")


def test_a_card_of_amd(tmp_path: Path) -> None:
    assert read_devices(write(tmp_path, "amdgpu")) == [RADEON]
    table = tmp_path / "sys/class/drm/card1/device/gpu_metrics"
    # PPT0 and HOTSPOT; others are for a choice of the driver (FIT).
    for reasons, expected in ((1 | 1 << 36, ("power", "temperature")), (1 << 57, ())):
        table.write_bytes(metrics_table(120, 3, reasons))
        assert read_devices(tmp_path) == [replace(RADEON, throttled=expected)]
    for unknown in (metrics_table(96, 1, 1), metrics_table(120, 3, 1)[:60], b""):
        table.write_bytes(unknown)
        assert read_devices(tmp_path) == [RADEON]


def test_processes_are_not_read_for_a_card_that_tells_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "memory_by_card", lambda _: pytest.fail("they were read"))
    assert read_devices(write(tmp_path, "amdgpu")) == [RADEON]


def test_a_sensor_that_cannot_be_read_is_absent(tmp_path: Path) -> None:
    device = write(tmp_path, "amdgpu") / "sys/class/drm/card1/device"
    (device / "hwmon/hwmon4/temp1_input").unlink()
    (device / "hwmon/hwmon4/temp2_input").unlink()
    (device / "gpu_busy_percent").write_text("", "utf-8")
    assert read_devices(tmp_path) == [replace(RADEON, load=None, temperature_c=None)]


def test_a_suspended_card_is_not_read(tmp_path: Path) -> None:
    asleep = DeviceReading("0000:03:00.0", "AMD 73FF", problem="it is suspended")
    hold(tmp_path, "0000:03:00.0")
    assert read_devices(write(tmp_path, "suspended")) == [asleep]


ARC = DeviceReading(
    "0000:0a:00.0",
    "Intel 56A0",
    power_limit_w=190,
    throttled=("power", "temperature"),
    energy_j=51_000,
    idle_s=812,
)


def test_a_card_of_intel_has_power_and_load_by_its_counters(tmp_path: Path) -> None:
    card = write(tmp_path, "i915") / "sys/class/drm/card0"

    def count(energy_uj: int, idle_ms: int) -> None:
        (card / "device/hwmon/hwmon3/energy1_input").write_text(f"{energy_uj}\n")
        (card / "gt/gt0/rc6_residency_ms").write_text(f"{idle_ms}\n")

    times_s = iter((20.0, 20.1))
    (found,) = read_devices(
        tmp_path, lambda _: count(51_015_000_000, 812_025), lambda: next(times_s)
    )
    assert found.power_w == pytest.approx(150)
    assert found.load == pytest.approx(0.75)
    assert replace(found, power_w=None, load=None) == replace(ARC, energy_j=51_015, idle_s=812.025)

    # Counters that begin anew give no rate.
    (found,) = read_devices(tmp_path, lambda _: count(1_000_000, 1000))
    assert found == replace(ARC, energy_j=1, idle_s=1)

    # More idle time than has passed, as the counters are not read at the same moment.
    times_s = iter((30.0, 30.1))
    (found,) = read_devices(tmp_path, lambda _: count(2_000_000, 1150), lambda: next(times_s))
    assert found.load == 0


def test_sensors_of_another_part_are_not_those_of_the_card(tmp_path: Path) -> None:
    card = write(tmp_path, "i915") / "sys/class/drm/card0"
    (card / "device/hwmon/hwmon3/name").write_text("i915_gt1\n")
    (found,) = read_devices(tmp_path, lambda _: None)
    assert (found.energy_j, found.power_limit_w) == (None, None)


def test_another_card_of_intel(tmp_path: Path) -> None:
    root = write(tmp_path, "xe")
    (found,) = read_devices(root, lambda _: None)
    assert found == DeviceReading(
        "0000:04:00.0",
        "Intel E20B",
        load=1.0,
        temperature_c=54,
        power_w=0,
        throttled=(),
        energy_j=7300,
        idle_s=40,
    )


def test_the_memory_that_programs_hold_of_a_card_of_intel(tmp_path: Path) -> None:
    write(tmp_path, "xe")
    hold(tmp_path, "0000:04:00.0")
    (found,) = read_devices(tmp_path, lambda _: None)
    assert (found.memory_used_bytes, found.memory_free_bytes) == (3 * MIB, None)


def test_macs() -> None:
    apple = {
        "IOClass": "AGXAcceleratorG14X",
        "model": "Apple M2 Max",
        "PerformanceStatistics": {
            "Device Utilization %": 38,
            "In use system memory": 4 * 1024**3,
            "Alloc system memory": 9 * 1024**3,
        },
    }
    radeon = {
        "IOClass": "AMDRadeonX6000_AMDNavi21GraphicsAccelerator",
        "model": b"AMD Radeon Pro W6800X\0",
        "PerformanceStatistics": {
            "Device Utilization %": 5,
            "vramUsedBytes": 1024**3,
            "vramFreeBytes": 31 * 1024**3,
            "Temperature(C)": 47,
            "Total Power(W)": 33,
        },
    }
    assert parse_io_registry(plistlib.dumps([apple, radeon, {"IOClass": "Other"}])) == [
        DeviceReading("gpu0", "Apple M2 Max", load=0.38, memory_used_bytes=4 * 1024**3),
        DeviceReading(
            "gpu1",
            "AMDRadeonX6000_AMDNavi21GraphicsAccelerator",
            load=0.05,
            memory_used_bytes=1024**3,
            memory_total_bytes=32 * 1024**3,
            memory_free_bytes=31 * 1024**3,
            temperature_c=47,
            power_w=33,
        ),
        DeviceReading("gpu2", "Other"),
    ]


@pytest.mark.parametrize(
    "text", [b"", b"no such class", plistlib.dumps({"model": "x"}), plistlib.dumps([])[:60]]
)
def test_a_mac_that_tells_nothing_has_no_cards(text: bytes) -> None:
    assert parse_io_registry(text) == []
