"""Whether the device memory that a start needs is free."""

from dataclasses import replace

from support.samples import GIB, GPU, engine, model

from supervisor.builds.discover import Device
from supervisor.builds.help import FlagValue
from supervisor.plan.estimate import Estimate, MemoryInputs, estimate
from supervisor.plan.shortage import shortage

MIB = 1024**2
WORKER = Device("RPC0", "127.0.0.1:1", 8192, worker="a", free_mib=8000)


def taken(*devices: Device) -> Estimate:
    flags: dict[str, FlagValue] = {"gpu-layers": "all", "ctx-size": 8192, "parallel": 1}
    return estimate(MemoryInputs(model(tensor_bytes=GIB), flags, engine("b10434", *devices)))


def test_what_is_free_suffices_or_is_named() -> None:
    assert shortage(taken(GPU), {"Vulkan0": 2 * GIB}) is None
    reason = shortage(taken(GPU), {"Vulkan0": 100 * MIB})
    assert reason
    assert reason.endswith("of Vulkan0, which has 100.0 MiB free")


def test_a_device_of_which_nothing_is_known_has_enough() -> None:
    assert shortage(taken(GPU), {}) is None
    assert shortage(taken(replace(WORKER, free_mib=None)), {}) is None


def test_the_free_memory_of_a_worker_counts() -> None:
    assert shortage(taken(WORKER), {}) is None
    reason = shortage(taken(replace(WORKER, free_mib=100)), {})
    assert reason
    assert "of worker a, which has 100.0 MiB free" in reason
