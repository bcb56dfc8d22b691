"""The number of instances with `replicas = "auto"`."""

from __future__ import annotations

import pytest
from support.samples import GIB, GPU, engine, machine, model

from supervisor.builds.discover import Device
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.fit import MemoryCapacity, capacity
from supervisor.plan.shortage import decide

FLAGS = {"ctx-size": 8192, "parallel": 4, "cache-ram": 256}
ALONE = MemoryInputs(model(), FLAGS, engine())
SECOND = Device("Vulkan1", "another GPU", GPU.total_mib)


@pytest.mark.parametrize(
    ("cores", "models", "count"),
    [(2, 1, 1), (8, 1, 1), (15, 1, 1), (16, 1, 2), (16, 2, 1), (64, 2, 4), (128, 1, 4)],
)
def test_one_instance_per_eight_cores_of_a_models_share(
    cores: int, models: int, count: int
) -> None:
    here = machine(physical_cores=cores)
    found = decide(ALONE, here, capacity(here, ()), models)
    assert found.count == count
    assert f"{cores} physical cores" in found.reason


def test_memory_limits_the_number_of_instances() -> None:
    found = decide(ALONE, machine(physical_cores=64), MemoryCapacity(GIB + GIB // 4, {}), 1)
    assert found.count == 2
    assert "limited by memory" in found.reason
    assert decide(ALONE, machine(physical_cores=64), MemoryCapacity(1, {}), 1).count == 1


def test_one_instance_per_device_if_each_holds_the_model() -> None:
    memory_inputs = MemoryInputs(model(), FLAGS, engine("b10434", GPU, SECOND))
    has = capacity(machine(), (GPU, SECOND))
    found = decide(memory_inputs, machine(), has, 1)
    assert (found.count, found.devices) == (2, ("Vulkan0", "Vulkan1"))
    assert (
        decide(MemoryInputs(model(), FLAGS, engine("b10434", GPU)), machine(), has, 1).devices == ()
    )


def test_a_model_that_needs_all_devices_has_one_instance() -> None:
    large = model(tensor_bytes=30 * GIB, embedding_bytes=GIB)
    memory_inputs = MemoryInputs(large, FLAGS, engine("b10434", GPU, SECOND))
    found = decide(memory_inputs, machine(), capacity(machine(), (GPU, SECOND)), 1)
    assert (found.count, found.devices) == (1, ())


def test_a_single_or_configured_device_has_one_instance() -> None:
    on_one = MemoryInputs(model(), FLAGS, engine("b10434", GPU))
    assert decide(on_one, machine(), capacity(machine(), (GPU,)), 1).count == 1
    named = MemoryInputs(model(), {**FLAGS, "device": "Vulkan0"}, engine("b10434", GPU, SECOND))
    assert decide(named, machine(), capacity(machine(), (GPU, SECOND)), 1).devices == ()
