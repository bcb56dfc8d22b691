"""Which models leave the devices to other programs, and when they return."""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.instance_harness import RecordingTraffic

from proxy.router.model_queue import ModelDemand
from proxy.router.router import Router
from supervisor.engine.instance import Instance
from supervisor.engine.states import State
from supervisor.events import Event
from supervisor.fleet.devices import DeviceMonitor
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model
from supervisor.fleet.planner import LaunchPlanner
from supervisor.loading.controller import AdmissionController
from supervisor.loading.decide import Eviction
from supervisor.loading.device_yield import DeviceYield
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.settings.schema import Settings
from supervisor.system.devices import DeviceReading
from supervisor.system.paths import Directories

HOUR_S = 3600
GIB = 1024**3


class Admission:
    """Records commands; a stop closes models."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.commands: list[tuple[str, Sequence[str]]] = []
        self.gave_way: dict[str, None] = {}
        self.forecasts: dict[str, Eviction] = {}
        self.waits: dict[str, object] = {}

    def command(self, verb: str, names: Sequence[str]) -> Callable[[], bool]:
        self.commands.append((verb, names))
        for name in names:
            self.gave_way.pop(name, None)
            self._fleet.models[name].is_open = verb == "load"
        return lambda: True

    def waiting(self) -> dict[str, object]:
        return self.waits

    def forecast(self, model: Model) -> Eviction:
        return self.forecasts.get(model.entry.name, Eviction())

    def wake(self) -> None:
        pass


class Memory:
    """Models named gpu… use a device."""

    def __init__(self) -> None:
        self.has_room_for: set[str] = set()
        self.readings: list[bool] = []  # of each, whether a device is full
        self.returning: dict[str, int] = {}
        self.needed_by_others: frozenset[str] = frozenset()

    def take_devices(self, models: Sequence[Model]) -> bool:
        return any(model.entry.name.startswith("gpu") for model in models)

    def capacity(self) -> dict[str, int]:
        return {"Vulkan0": 2 * GIB}

    def free(self) -> dict[str, int]:
        return {"Vulkan0": -1 if self.needed_by_others else GIB}

    def required_bytes(self, models: Sequence[Model]) -> dict[str, dict[str, int]]:
        return {
            model.entry.name: {"Vulkan0": GIB} if self.take_devices([model]) else {}
            for model in models
        }

    def has_room(self, model: Model) -> bool:
        return model.entry.name in self.has_room_for

    async def refresh_devices(self, _: Iterable[Model], *, is_full: bool = False) -> bool:
        self.readings.append(is_full)
        return True


class House:
    def __init__(self, directory: Path, **devices: Any) -> None:
        entry = {"path": "/models/chat.gguf"}
        planner = LaunchPlanner(
            Settings(models={"gpu1": entry, "gpu2": entry, "cpu": entry}, devices=devices),
            Directories(*[directory] * 5),
        )
        self.fleet = Fleet(planner, RecordingTraffic(), lambda *_, **__: None)
        self.events: list[str] = []
        self.admission = Admission(self.fleet)
        self.memory = Memory()
        self.now_s = 0.0
        self.cards: Sequence[DeviceReading] = ()
        self.yielding = DeviceYield(
            self.fleet,
            cast("AdmissionController", self.admission),
            cast("MemoryUsage", self.memory),
            DeviceMonitor(lambda: self.cards, lambda: self.now_s),
            self.emit,
            lambda: self.now_s,
            lambda: datetime(2026, 11, 28, tzinfo=UTC) + timedelta(seconds=self.now_s),
        )

    def emit(self, name: str, /, **fields: object) -> None:
        self.events.append(" ".join([name, *map(str, fields.values())]))
        self.yielding.observe(Event(name, datetime.now(UTC), fields))

    async def look(self, after_s: float) -> float | None:
        self.now_s += after_s
        return await self.yielding.look()

    @property
    def refusals(self) -> dict[str, bool]:
        """Whether requests for a model are told that its devices are left to others."""
        return {name: bool(model.refusal) for name, model in self.fleet.models.items()}

    @property
    def open_models(self) -> list[str]:
        return [name for name, model in self.fleet.models.items() if model.is_open]


def test_models_that_use_a_device_are_stopped_until_the_end(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.yielding.begin(math.inf)
    assert house.admission.commands == [("stop", ["gpu1", "gpu2"])]
    assert house.refusals == {"gpu1": True, "gpu2": True, "cpu": False}
    assert house.yielding.models == ["gpu1", "gpu2"]
    house.yielding.begin(60)  # another time; what is stopped stays so
    assert house.yielding.models == ["gpu1", "gpu2"]
    house.yielding.end()
    assert house.refusals == dict.fromkeys(house.fleet.models, False)
    assert house.open_models == ["gpu1", "gpu2", "cpu"]
    assert house.yielding.left_s is None
    # They were not loaded before.
    assert house.events[-1] == "devices.taken_back "
    assert house.admission.commands == [("stop", ["gpu1", "gpu2"])]


def test_what_commands_change_meanwhile_stays(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.yielding.begin(60)
    started, stopped = house.fleet.models["gpu1"], house.fleet.models["gpu2"]
    started.is_open, started.refusal = True, None
    stopped.refusal = None
    assert house.yielding.models == []
    house.yielding.end()
    assert (started.is_open, stopped.is_open) == (True, False)


def test_a_model_that_was_stopped_before_stays_so(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.fleet.models["gpu2"].is_open = False
    house.yielding.begin(60)
    assert house.yielding.models == ["gpu1"]
    house.yielding.end()
    assert house.open_models == ["gpu1", "cpu"]


def test_each_yield_is_counted_by_its_reason(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.yielding.begin(60)
    house.yielding.begin(60)
    ((sample,),) = [metric.samples for metric in house.yielding.metrics()]
    assert (sample.labels, sample.value) == ({"reason": "corral yield"}, 2)


async def test_it_ends_by_itself_and_loads_what_was_to_be_loaded(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.admission.waits["gpu1"] = ()
    house.admission.gave_way["gpu2"] = None
    house.yielding.begin(60)
    assert await house.look(59) == 1
    assert await house.look(1) is None
    assert house.events == [
        "devices.yielded gpu1 gpu2 corral yield",
        "devices.taken_back gpu1 gpu2",
    ]
    assert house.admission.commands[-1] == ("load", ["gpu1", "gpu2"])


async def test_quiet_hours_are_a_yield_of_each_day(tmp_path: Path) -> None:
    house = House(tmp_path, quiet_hours="22:00-07:00")
    assert await house.look(8 * HOUR_S) == 30  # the clock may be set
    assert house.open_models == ["gpu1", "gpu2", "cpu"]
    await house.look(14 * HOUR_S)
    assert house.open_models == ["cpu"]
    assert (house.yielding.left_s, house.yielding.is_quiet_hours) == (9 * HOUR_S, True)
    await house.look(9 * HOUR_S)  # the machine was suspended until their end
    assert house.open_models == ["gpu1", "gpu2", "cpu"]
    assert house.events == ["devices.yielded gpu1 gpu2 quiet hours", "devices.taken_back "]


async def test_a_command_ends_the_quiet_hours_of_one_day(tmp_path: Path) -> None:
    house = House(tmp_path, quiet_hours="22:00-07:00")
    await house.look(0)
    house.yielding.end()
    await house.look(HOUR_S)
    assert (house.open_models, house.yielding.left_s) == (["gpu1", "gpu2", "cpu"], None)
    await house.look(22 * HOUR_S)
    assert house.yielding.left_s == 8 * HOUR_S


async def test_the_longer_of_command_and_quiet_hours_counts(tmp_path: Path) -> None:
    house = House(tmp_path, quiet_hours="00:00-01:00")
    house.yielding.begin(2 * HOUR_S)
    await house.look(0)
    assert house.yielding.left_s == 2 * HOUR_S
    await house.look(HOUR_S)
    assert (house.yielding.left_s, house.yielding.is_quiet_hours) == (HOUR_S, False)
    await house.look(HOUR_S)
    assert house.yielding.left_s is None


async def test_a_model_that_gave_way_returns_once_it_has_had_room_for_long(tmp_path: Path) -> None:
    house = House(tmp_path, **{"yield": "idle"}, check_interval_s=10, return_after_s=20)
    assert await house.look(0) is None  # no model is loaded
    house.admission.gave_way |= dict.fromkeys(["gpu1", "gpu2"])
    house.memory.has_room_for |= {"gpu1", "gpu2"}
    assert await house.look(10) == 10
    house.memory.has_room_for.remove("gpu1")
    await house.look(10)
    house.memory.has_room_for.add("gpu1")
    await house.look(9)
    assert house.admission.commands == []
    await house.look(1)
    assert house.events == ["devices.taken_back gpu2"]
    assert house.admission.commands == [("load", ["gpu2"])]
    await house.look(18)
    assert house.yielding.gave_way == ["gpu1"]
    await house.look(1)
    assert house.admission.commands[1:] == [("load", ["gpu1"])]


async def test_one_model_returns_at_a_time(tmp_path: Path) -> None:
    """There may be no room for the second one beside the first."""
    house = House(tmp_path, **{"yield": "idle"}, return_after_s=0)
    house.admission.gave_way |= dict.fromkeys(["gpu1", "gpu2"])
    house.memory.has_room_for |= {"gpu1", "gpu2"}
    await house.look(0)
    assert house.admission.commands == [("load", ["gpu1"])]


async def test_a_return_unloads_no_other_model(tmp_path: Path) -> None:
    house = House(tmp_path, **{"yield": "idle"}, return_after_s=0)
    house.admission.gave_way["gpu1"] = None
    house.memory.has_room_for.add("gpu1")
    house.admission.forecasts["gpu1"] = Eviction(models=("cpu",))
    await house.look(0)
    assert house.admission.commands == []


@pytest.mark.parametrize(("used", "is_full"), [(1, False), (4, True)])
async def test_cards_tell_when_to_list_devices(tmp_path: Path, used: int, *, is_full: bool) -> None:
    house = House(tmp_path, **{"yield": "idle"})
    house.admission.gave_way["gpu1"] = None
    free = (4 - used) * GIB
    card = DeviceReading("1", "A", memory_used_bytes=used * GIB, memory_free_bytes=free)
    # Of what other users' programs hold, Intel's drivers tell nothing.
    house.cards = [card, DeviceReading("2", "B", memory_used_bytes=0)]
    await house.look(10)
    await house.look(10)
    # The memory of one card is unknown, so each look lists the devices.
    assert house.memory.readings == [is_full] * 2
    house.cards = [card]
    await house.look(10)
    await house.look(10)
    assert house.memory.readings == [is_full] * 3
    house.memory.returning["Vulkan0"] = GIB  # an engine has ended
    await house.look(10)
    assert house.memory.readings == [is_full] * 4
    house.cards = [card, replace(card, id="2", memory_free_bytes=0)]
    await house.look(10)
    assert house.memory.readings == [*[is_full] * 4, True]


class LoadedModels:
    """The models of a house, loaded, while other programs need memory of their device."""

    def __init__(self, house: House, monkeypatch: pytest.MonkeyPatch, *, requests: int = 0) -> None:
        self.states = dict.fromkeys(house.fleet.models, State.READY)
        router, demand = Router(), ModelDemand(0, requests, 0.0, 0)
        monkeypatch.setattr(router, "demand", lambda _: demand)
        monkeypatch.setattr(Instance, "snapshot", lambda instance: self._facts(instance.model))
        house.memory.needed_by_others = frozenset({"Vulkan0"})
        self.admission = AdmissionController(
            house.fleet, router, house.emit, cast("MemoryUsage", house.memory), lambda: 60.0
        )

    def _facts(self, model: str) -> SimpleNamespace:
        return SimpleNamespace(state=self.states[model], up_s=60.0, load_progress=None)

    async def decide(self) -> None:
        async with asyncio.TaskGroup() as group:
            deciding = group.create_task(self.admission.serve())
            await asyncio.sleep(0)  # it waits for an event now
            deciding.cancel()


@pytest.mark.parametrize(("yields", "paused"), [("idle", []), ("always", ["gpu1"])])
async def test_busy_models_give_way_only_if_models_always_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, yields: str, paused: list[str]
) -> None:
    models = LoadedModels(House(tmp_path, **{"yield": yields}), monkeypatch, requests=1)
    await models.decide()
    found = models.admission.loaded_states()
    assert [name for name, state in found.items() if state.is_paused] == paused


@pytest.mark.parametrize("command", ["unload", "stop", "restart", None])
async def test_what_was_loaded_or_commanded_since_no_longer_counts_as_unloaded_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str | None
) -> None:
    house = House(tmp_path, **{"yield": "idle"})
    models = LoadedModels(house, monkeypatch)
    await models.decide()
    assert [*models.admission.gave_way] == ["gpu1"]
    house.memory.needed_by_others = frozenset()
    models.states["gpu1"] = State.STOPPED
    await models.decide()
    assert [*models.admission.gave_way] == ["gpu1"]
    if command:
        models.admission.command(command, ["gpu1"])
    else:
        models.states["gpu1"] = State.STARTING
        await models.decide()
    assert [*models.admission.gave_way] == []
