"""Memory that models take, by estimate and by observation."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.growth import is_linear
from support.instance_harness import RecordingTraffic
from support.samples import GIB, GPU, engine, model

from supervisor.builds.discover import Engine
from supervisor.builds.help import FlagValue
from supervisor.engine.instance import Instance
from supervisor.engine.states import State
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import LaunchFingerprint
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.start_memory import DeviceMemory
from supervisor.loading.memory_usage import HOST, MemoryUsage, ObservedMemory
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.plan import Plan
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories

BUDGET_BYTES = 8 * 1024**3
STAMP = (Path("/models/chat.gguf"), None, None)
FINGERPRINT = LaunchFingerprint(STAMP, (), STAMP, None, {"ctx-size": 4096, "parallel": 2}, ())
OTHER = replace(FINGERPRINT, flags={"ctx-size": 8192})


class Planned(LaunchPlanner):
    """Has a plan without reading files."""

    def engine(self) -> Engine:
        return engine()

    def plan(self, model_name: str) -> Plan:
        memory_inputs = MemoryInputs(model(), {"ctx-size": 2048, "parallel": 1}, engine())
        return Plan(model_name, engine(), model(), (), (), (), 1, 2048, memory_inputs)


def taken_bytes(directory: Path, seen_bytes: int) -> int:
    """Return the memory of a model whose instance was seen to take so much."""
    settings = Settings(
        models={"chat": {"path": "/models/chat.gguf"}},
        supervisor={"memory_budget": BUDGET_BYTES},
    )
    planner = Planned(settings, Directories(*[directory] * 5))
    fleet = Fleet(planner, RecordingTraffic(), lambda *_, **__: None)
    fleet.replica("chat.0").fingerprint = FINGERPRINT
    observed = ObservedMemory()
    observed.note(FINGERPRINT, seen_bytes)
    usage = MemoryUsage(fleet, observed=observed)
    return usage.required_bytes([fleet.models["chat"]])["chat"][HOST]


def test_an_observation_above_the_estimate_replaces_it(tmp_path: Path) -> None:
    estimated = taken_bytes(tmp_path, 0)
    assert estimated < taken_bytes(tmp_path, BUDGET_BYTES // 2) < BUDGET_BYTES


def test_a_model_that_outgrew_the_capacity_takes_all_of_it(tmp_path: Path) -> None:
    assert taken_bytes(tmp_path, 2 * BUDGET_BYTES) == BUDGET_BYTES


def test_observations_are_per_launch_fingerprint() -> None:
    observed = ObservedMemory()
    observed.note(FINGERPRINT, 500)
    same = replace(FINGERPRINT, flags={"parallel": 2, "ctx-size": 4096})
    assert observed.note(same, 0) == 500
    assert observed.note(OTHER, 0) == 0


def test_the_largest_observation_is_kept() -> None:
    observed = ObservedMemory()
    for seen in (500, 900, 700):
        observed.note(FINGERPRINT, seen)
    assert observed.note(FINGERPRINT, 0) == 900


def test_the_least_recently_used_fingerprints_are_forgotten() -> None:
    observed = ObservedMemory(observed_max=2)
    observed.note(FINGERPRINT, 1)
    observed.note(OTHER, 2)
    assert observed.note(FINGERPRINT, 0) == 1
    observed.note(replace(FINGERPRINT, args=("--verbose",)), 3)
    assert observed.note(FINGERPRINT, 0) == 1
    assert observed.note(OTHER, 0) == 0


def test_the_capacity_is_looked_up_once_for_all_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"m{number}" for number in range(9)]
    settings = Settings(models={name: {"path": "/models/chat.gguf"} for name in names})
    fleet = Fleet(
        Planned(settings, Directories(*[tmp_path] * 5)), RecordingTraffic(), lambda *_, **__: None
    )
    engines = iter([engine()])
    monkeypatch.setattr(Planned, "engine", lambda _: next(engines))
    assert list(MemoryUsage(fleet).required_bytes(fleet.models.values())) == names


def test_adding_models_to_a_fleet_is_linear(tmp_path: Path) -> None:
    def add(count: int) -> None:
        models = {f"m{at}": {"path": "/models/chat.gguf"} for at in range(count)}
        planner = Planned(Settings(models=models), Directories(*[tmp_path] * 5))
        Fleet(planner, RecordingTraffic(), lambda *_, **__: None)

    assert is_linear(add, 250)


def test_a_worker_serves_one_model_at_a_time(tmp_path: Path) -> None:
    one = {"path": "/models/chat.gguf", "workers": ["a"]}
    other = {"path": "/models/chat.gguf"}
    settings = Settings(
        models={"one": one, "two": one, "three": other}, workers={"a": {"local": True}}
    )
    fleet = Fleet(
        Planned(settings, Directories(*[tmp_path] * 5)), RecordingTraffic(), lambda *_, **__: None
    )
    usage = MemoryUsage(fleet)
    assert usage.capacity()["worker a"] == 1
    required = usage.required_bytes(fleet.models.values())
    assert [required[name].get("worker a", 0) for name in fleet.models] == [1, 1, 0]


class OnDevice(Planned):
    """The same on a device, whose layers the user has set."""

    def engine(self) -> Engine:
        return engine("b10434", GPU)

    def plan(self, model_name: str) -> Plan:
        flags: dict[str, FlagValue] = {"ctx-size": 2048, "parallel": 1, "gpu-layers": "all"}
        large = model(tensor_bytes=(8 if model_name == "chat" else 40) * GIB)
        memory_inputs = MemoryInputs(large, flags, self.engine())
        return Plan(model_name, self.engine(), large, (), (), (), 1, 2048, memory_inputs)


async def test_what_other_programs_take_of_a_device_is_no_room(tmp_path: Path) -> None:
    entry = {"path": "/models/chat.gguf"}
    settings = Settings(models={"chat": entry, "huge": entry})
    planner = OnDevice(settings, Directories(*[tmp_path] * 5))
    fleet = Fleet(planner, RecordingTraffic(), lambda *_, **__: None)
    free_mib = 20 * 1024
    fleet.device_memory = DeviceMemory(lambda *_: [replace(GPU, free_mib=free_mib)], lambda: 100.0)
    usage, (chat, huge) = MemoryUsage(fleet), fleet.models.values()
    needs = usage.required_bytes([chat])["chat"]["Vulkan0"]
    await usage.refresh_devices([chat])
    assert usage.capacity()["Vulkan0"] == usage.free()["Vulkan0"] == 20 * GIB
    device = usage.by_purpose()["Vulkan0"]
    assert (device.total, device.others) == (24 * GIB, 4 * GIB)
    assert (device.weights, device.caches, device.buffers) == (0, 0, 0)
    assert usage.required_bytes([chat])["chat"]["Vulkan0"] == needs
    free_mib = 4 * 1024
    fleet.device_memory = DeviceMemory(lambda *_: [replace(GPU, free_mib=free_mib)], lambda: 100.0)
    await usage.refresh_devices([chat])
    # All of what is left, so that idle models go; what never fits must not have them unloaded.
    assert usage.required_bytes([chat])["chat"]["Vulkan0"] == usage.capacity()["Vulkan0"] == 4 * GIB
    assert usage.required_bytes([huge])["huge"]["Vulkan0"] > 24 * GIB
    # A loaded model has its memory, and gives all of it back.
    ready = SimpleNamespace(state=State.READY, pid=None, cause=None)
    chat.replicas[0].instance = cast("Instance", SimpleNamespace(snapshot=lambda: ready))
    assert usage.required_bytes([chat])["chat"]["Vulkan0"] == needs


@pytest.mark.parametrize(("yields", "reserved"), [("idle", {"Vulkan0": GIB}), ("never", {})])
async def test_other_programs_that_take_more_get_a_reserve(
    tmp_path: Path, yields: str, reserved: dict[str, int]
) -> None:
    settings = Settings(
        models={"chat": {"path": "/models/chat.gguf"}}, devices={"yield": yields, "reserve": GIB}
    )
    planner = OnDevice(settings, Directories(*[tmp_path] * 5))
    fleet = Fleet(planner, RecordingTraffic(), lambda *_, **__: None)
    usage, (chat,) = MemoryUsage(fleet), fleet.models.values()

    async def read(free_mib: int | None, *, is_full: bool = False) -> dict[str, int]:
        listed = [] if free_mib is None else [replace(GPU, free_mib=free_mib)]
        memory = fleet.device_memory = DeviceMemory(lambda *_: listed, lambda: 100.0)
        assert await usage.refresh_devices([chat], is_full=is_full)
        return dict(memory.reserved_bytes)

    total_mib = 24 * 1024
    assert await read(total_mib - 4096) == {}  # what they took before counts as usual
    assert await read(total_mib - 5120) == reserved
    assert usage.needed_by_others == reserved.keys()
    assert usage.free()["Vulkan0"] == 19 * GIB - sum(reserved.values())
    assert usage.has_room(chat)
    assert await read(total_mib - 2048) == {}
    assert await read(total_mib - 4096) == reserved
    assert await read(512, is_full=True) == reserved
    assert usage.free()["Vulkan0"] == GIB // 2 - sum(reserved.values())
    # An engine cannot list the device, because it is full or for another reason.
    assert await read(None, is_full=True) == reserved
    assert usage.free()["Vulkan0"] <= 0
    assert not usage.has_room(chat)
    assert await read(None) == {}
