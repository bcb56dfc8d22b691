import os

import psutil

from supervisor.system.machine import cpu_flags, read


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
