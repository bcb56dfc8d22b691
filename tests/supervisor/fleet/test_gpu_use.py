"""The parts of a model on GPUs, by its plans."""

from __future__ import annotations

from typing import Any

from support.samples import GIB, GPU, engine, machine, model

from proxy.request.models import GpuUse
from supervisor.builds.discover import Device
from supervisor.fleet.model import gpu_use
from supervisor.plan.plan import Plan, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry
from supervisor.system.paths import shipped_directory

WORKER = Device("RPC0", "a worker", 8 * 1024)


def planned(*devices: Device, **flags: Any) -> Plan:
    found = model()
    entry = ModelEntry("chat", found.path, flags=flags)
    base = load("base", (shipped_directory("profiles"),))
    return make_plan(entry, base, engine("b10434", *devices), found, machine(), instances=1)


def test_layers_and_memory_on_a_gpu_are_those_of_the_plan() -> None:
    plan = planned(GPU)
    use = gpu_use([plan.estimate])
    assert use == GpuUse(31, plan.estimate.devices["Vulkan0"].total, ("Vulkan0",))
    assert 0 < use.memory_bytes < GIB


def test_without_a_device_nothing_is_on_a_gpu() -> None:
    assert gpu_use([planned().estimate]) == GpuUse()
    assert gpu_use([]) == GpuUse()
    on_host = {"gpu-layers": 0, "op-offload": False}
    assert gpu_use([planned(GPU, **on_host).estimate]) == GpuUse()


def test_a_worker_is_no_gpu() -> None:
    assert gpu_use([planned(WORKER).estimate]) == GpuUse()
    shared = gpu_use([planned(GPU, WORKER).estimate])
    assert (shared.layers, shared.devices) == (24, ("Vulkan0",))
