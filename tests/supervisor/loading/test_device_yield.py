"""Which models are stopped while the devices are left to other programs, and loaded again after."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from support.instance_harness import RecordingTraffic

from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model
from supervisor.fleet.planner import LaunchPlanner
from supervisor.loading.controller import AdmissionController
from supervisor.loading.device_yield import DeviceYield
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories


class Admission:
    """Records commands; a stop closes models."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.commands: list[tuple[str, Sequence[str]]] = []

    def command(self, verb: str, names: Sequence[str]) -> Callable[[], bool]:
        self.commands.append((verb, names))
        for name in names:
            self._fleet.models[name].is_open = verb == "load"
        return lambda: True


class OnDevice:
    """Models named gpu… use a device."""

    def take_devices(self, models: Sequence[Model]) -> bool:
        return any(model.entry.name.startswith("gpu") for model in models)


class House:
    def __init__(self, directory: Path) -> None:
        entry = {"path": "/models/chat.gguf"}
        planner = LaunchPlanner(
            Settings(models={"gpu1": entry, "gpu2": entry, "cpu": entry}),
            Directories(*[directory] * 5),
        )
        self.fleet = Fleet(planner, RecordingTraffic(), lambda *_, **__: None)
        self.events: list[str] = []
        self.ended = asyncio.Event()
        self.admission = Admission(self.fleet)
        self.yielding = DeviceYield(
            self.fleet,
            cast("AdmissionController", self.admission),
            cast("MemoryUsage", OnDevice()),
            self.emit,
        )

    def emit(self, name: str, /, **fields: object) -> None:
        self.events.append(f"{name} {fields['models']}")
        if name == "devices.taken_back":
            self.ended.set()

    @property
    def refusals(self) -> dict[str, bool]:
        """Whether requests for a model are told that its devices are left to others."""
        return {name: bool(model.refusal) for name, model in self.fleet.models.items()}


async def test_models_that_use_a_device_are_stopped_until_the_end(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.yielding.begin(float("inf"))
    assert house.admission.commands == [("stop", ["gpu1", "gpu2"])]
    assert house.refusals == {"gpu1": True, "gpu2": True, "cpu": False}
    assert house.yielding.models == ["gpu1", "gpu2"]
    house.yielding.begin(60)  # another time; what is stopped stays so
    assert house.yielding.models == ["gpu1", "gpu2"]
    house.yielding.end()
    assert house.refusals == dict.fromkeys(house.fleet.models, False)
    assert all(model.is_open for model in house.fleet.models.values())
    assert house.yielding.left_s is None
    # They were not loaded before.
    assert house.events[-1] == "devices.taken_back "
    assert house.admission.commands == [("stop", ["gpu1", "gpu2"])]


async def test_what_commands_change_meanwhile_stays(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.yielding.begin(60)
    started, stopped = house.fleet.models["gpu1"], house.fleet.models["gpu2"]
    started.is_open, started.refusal = True, None
    stopped.refusal = None
    assert house.yielding.models == []
    house.yielding.end()
    assert (started.is_open, stopped.is_open) == (True, False)


async def test_it_ends_by_itself(tmp_path: Path) -> None:
    house = House(tmp_path)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        serving = group.create_task(house.yielding.serve())
        await asyncio.sleep(0)
        house.yielding.begin(0.01)
        await house.ended.wait()
        serving.cancel()
    assert house.events == ["devices.yielded gpu1 gpu2", "devices.taken_back "]
    assert house.fleet.models["gpu1"].is_open
