import os
from types import SimpleNamespace

import psutil
import pytest

from supervisor.system.machine import cpu_flags, is_on_battery, read


def test_a_machine_has_no_more_than_its_hardware() -> None:
    found = read()
    assert 1 <= found.physical_cores <= found.logical_cores <= len(os.sched_getaffinity(0))
    assert 0 < found.memory_available_bytes <= found.memory_bytes <= psutil.virtual_memory().total
    assert found.memlock_bytes is None or found.memlock_bytes >= 0


def test_cores_are_those_of_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert read().physical_cores == read().logical_cores == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cpu_flags_are_read_from_proc() -> None:
    assert cpu_flags() == read().cpu_flags
    assert "fpu" in cpu_flags() or not cpu_flags()


@pytest.mark.parametrize(
    ("battery", "is_used"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=None), False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=False), True),
    ],
)
def test_the_battery_is_read_again_after_half_a_minute(
    battery: object, *, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [battery, SimpleNamespace(power_plugged=True)]
    monkeypatch.setattr(psutil, "sensors_battery", lambda: seen.pop(0), raising=False)
    at_s = 1e9 + 120 * len(str(battery))  # of each case another time
    assert [is_on_battery(at_s + later_s) for later_s in (0, 1, 60)] == [is_used, is_used, False]


def test_a_system_that_tells_nothing_of_its_battery_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    assert not is_on_battery(2e9)
