"""Device memory at a start: awaited after an unload, short, and given up after a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import samples
from support.instance_harness import RecordingTraffic
from support.samples import GPU, engine, model

from supervisor.builds.discover import Device, Engine
from supervisor.engine.exit_cause import FailureCause
from supervisor.errors import DeviceMemoryShort, EngineBroken
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.start_memory import DeviceMemory, StartMemory
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.plan import Plan
from supervisor.plan.setting import values
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories

FLAGS = {"gpu-layers": "all", "ctx-size": 65536, "parallel": 4, "kv-unified": False}
FULL = FailureCause("device_memory", "the device's memory is full", "", permanent=False)


class Planned(LaunchPlanner):
    """Has plans without reading files."""

    flags: Mapping[str, Any] = FLAGS
    from_user: frozenset[str] = frozenset()

    def engine(self) -> Engine:
        return engine("b10434", GPU)

    def plan(self, model_name: str) -> Plan:
        reduced = self.reductions_of(model_name)
        inputs = MemoryInputs(model(), {**self.flags, **values(reduced)}, self.engine())
        return Plan(
            *(model_name, self.engine(), model(), (), (), (), 4, 65536, inputs),
            from_user=self.from_user,
            reduced=reduced,
        )


class Machine:
    """A device, how much of it is free at each listing, and a clock."""

    def __init__(self, directory: Path, *free_mib: int, **more: Any) -> None:
        settings = Settings(models={"chat": {"path": "/models/chat.gguf", **more}})
        self.planner = Planned(settings, Directories(*[directory] * 5))
        self.free_mib = [*free_mib]
        self.now_s = 100.0
        self.events: list[tuple[str, Mapping[str, object]]] = []
        self.devices = DeviceMemory(self.list_devices, lambda: self.now_s)
        self.memory = StartMemory(self.devices, self.emit, pause_s=0)
        fleet = Fleet(self.planner, RecordingTraffic(), self.emit)
        self.replica: Replica = fleet.replica("chat.0")

    def emit(self, name: str, /, **fields: object) -> None:
        self.events.append((name, fields))

    def list_devices(self, _: Engine, _limit_s: float) -> Sequence[Device]:
        free = self.free_mib.pop(0) if len(self.free_mib) > 1 else self.free_mib[0]
        return [replace(GPU, free_mib=free)]

    def reduced(self) -> list[tuple[object, object]]:
        return [
            (event["key"], event["after"]) for name, event in self.events if name == "model.reduced"
        ]


async def test_a_model_that_finds_its_memory_starts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 8000)
    assert await machine.memory.is_there(machine.replica)
    assert machine.replica.free_bytes == {"Vulkan0": 8000 * 1024**2}


async def test_memory_that_others_hold_is_named(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 100)
    with pytest.raises(DeviceMemoryShort, match=r"chat does not fit now: it needs .* 100\.0 MiB"):
        await machine.memory.is_there(machine.replica)


async def test_the_reserve_of_other_programs_stays_free(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 8000)
    machine.devices.reserved_bytes = {"Vulkan0": 7900 * 1024**2}
    with pytest.raises(DeviceMemoryShort, match=r"chat does not fit now: it needs .* 100\.0 MiB"):
        await machine.memory.is_there(machine.replica)


async def test_after_an_unload_memory_is_awaited_but_not_for_ever(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 100)
    machine.devices.note_exit(5.0)
    assert not await machine.memory.is_there(machine.replica)
    machine.now_s += 5
    with pytest.raises(DeviceMemoryShort):
        await machine.memory.is_there(machine.replica)
    machine.devices.note_exit(5.0)
    machine.free_mib = [100, 8000]
    assert not await machine.memory.is_there(machine.replica)
    assert await machine.memory.is_there(machine.replica)


async def test_layers_that_the_engine_fits_start_beside_other_programs(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1040)  # the engine leaves 1024 MiB free
    machine.planner.flags = {**FLAGS, "gpu-layers": "auto", "fit": "on"}
    assert await machine.memory.is_there(machine.replica)
    free = machine.replica.free_bytes
    beside = machine.planner.plan_at(machine.replica.place, free).estimate.layers_offloaded
    assert beside < machine.planner.plan("chat").estimate.layers_offloaded


async def test_layers_that_would_not_fit_into_main_memory_either_are_not_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, 1040)
    machine.planner.flags = {**FLAGS, "gpu-layers": "auto", "fit": "on"}
    without = samples.machine(memory_available_bytes=0)
    monkeypatch.setattr("supervisor.system.machine.read", lambda: without)
    with pytest.raises(DeviceMemoryShort):
        await machine.memory.is_there(machine.replica)


async def test_an_engine_that_lists_nothing_is_started(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    def fail(_: Engine, _limit_s: float) -> Sequence[Device]:
        raise EngineBroken("it does not run")

    machine.memory = StartMemory(DeviceMemory(fail), machine.emit)
    assert await machine.memory.is_there(machine.replica)


async def test_less_is_planned_after_each_failure_until_nothing_is_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 20_000)
    for _ in range(3):
        assert await machine.memory.is_there(machine.replica)
        assert machine.memory.reduce(machine.replica, FULL)
    assert machine.reduced() == [
        ("ctx-size", 32768),
        ("cache-type-k", "q8_0"),
        ("cache-type-v", "q8_0"),
        ("gpu-layers", 15),
    ]
    assert await machine.memory.is_there(machine.replica)
    assert not machine.memory.reduce(machine.replica, FULL)
    reason = machine.planner.plan("chat").reduced["ctx-size"].reason
    assert reason == "with ctx-size = 65536, the device's memory is full"


async def test_a_failure_of_another_kind_gives_up_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 20_000)
    other = FailureCause("model_truncated", "the file is cut short", "", permanent=True)
    assert not machine.memory.reduce(machine.replica, other)


async def test_a_setting_forbids_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 20_000, on_out_of_memory="fail")
    assert not machine.memory.reduce(machine.replica, FULL)


async def test_what_the_user_set_stays(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 20_000)
    machine.planner.from_user = frozenset({"ctx-size", "cache-type-k", "cache-type-v"})
    assert machine.memory.reduce(machine.replica, FULL)
    assert machine.reduced() == [("gpu-layers", 15)]


async def test_a_failure_of_an_older_plan_reduces_a_model_no_further(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, 20_000)
    await machine.memory.is_there(machine.replica)
    assert machine.memory.reduce(machine.replica, FULL)
    assert machine.memory.reduce(machine.replica, FULL)
    assert machine.reduced() == [("ctx-size", 32768)]


async def test_what_was_given_up_for_want_of_free_memory_comes_back_with_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 700, 700, 20_000)
    short = FailureCause("device_memory_short", "it does not fit now", "", permanent=False)
    with pytest.raises(DeviceMemoryShort):
        await machine.memory.is_there(machine.replica)
    assert machine.memory.reduce(machine.replica, short)
    assert await machine.memory.is_there(machine.replica)
    assert machine.replica.attempted
    assert await machine.memory.is_there(machine.replica)
    assert not machine.replica.attempted
    assert machine.events[-1][0] == "model.restored"


async def test_new_settings_of_a_model_end_its_reductions(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 20_000)
    assert machine.memory.reduce(machine.replica, FULL)
    assert machine.planner.reductions_of("chat")
    entry = replace(machine.planner.entries["chat"], profile="low-memory")
    assert machine.planner.reductions.find(entry)[1] == {}
