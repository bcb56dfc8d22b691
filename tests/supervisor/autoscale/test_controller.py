"""Changes of a running model: made beside it or not at all, and nothing is started unwanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from support.reload_harness import BROKEN, GOOD, ReloadHarness, settings
from support.samples import machine

from proxy.router.model_queue import ModelDemand
from proxy.router.router import Router
from supervisor.autoscale.apply import AdaptiveController
from supervisor.autoscale.slots import Change, ModelView, SlotDecider
from supervisor.engine.states import State
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.plan.setting import Setting

DOWN = frozenset({State.STOPPED})


def slots(count: int, *, is_urgent: bool = True) -> Change:
    return Change("parallel", Setting(count, "demand", "a test"), "a test", is_urgent=is_urgent)


class Wants:
    """Wants these changes, until they are made."""

    def __init__(self) -> None:
        self.wanted: list[Change] = []
        self.seen: list[ModelView] = []

    def sample(self, models: Sequence[ModelView]) -> None:
        self.seen = list(models)

    def changes(self, model: ModelView) -> Sequence[Change]:
        chosen = model.plan.memory_inputs.chosen
        return [
            entry
            for entry in self.wanted
            if entry.to is None or entry.to.value != chosen[entry.key]
        ]


class Adaptive(Router):
    """A fleet of the model `chat` and its controller, at a time of our own."""

    def __init__(self, harness: ReloadHarness) -> None:
        super().__init__()
        self.harness = harness
        self.wants = Wants()
        self.demand_now = ModelDemand(waiting=0, working=0, idle_since_s=0, cached_tokens=0)
        self.now_s = 0.0
        self.is_memory_wanted = False
        memory_usage = MemoryUsage(
            harness.fleet, lambda: machine(memory_available_bytes=harness.available_bytes)
        )
        self.controller = AdaptiveController(
            harness.fleet,
            self,
            harness.replacer,
            memory_usage,
            adapted=harness.adapted,
            emit=harness.stream.emit,
            deciders=[SlotDecider(), self.wants],
            is_memory_wanted=lambda: self.is_memory_wanted,
            clock=lambda: self.now_s,
        )

    def demand(self, _: str, /) -> ModelDemand:
        return self.demand_now

    async def adapt(self, *wanted: Change) -> bool:
        """Make these changes wanted, and apply those that are due; return whether any were."""
        self.wants.wanted = list(wanted)
        found = self.controller.sample()
        if found:
            await self.controller.change(*found)
        return found is not None

    def emitted(self, name: str) -> list[tuple[object, ...]]:
        return [
            (fields["before"], fields["after"])
            for event, fields in self.harness.events
            if event == name
        ]

    @property
    def running(self) -> list[int]:
        replicas = self.harness.fleet.models["chat"].replicas
        return [replica.plan.slots for replica in replicas if replica.plan]


@pytest.fixture
async def adaptive(tmp_path: Path) -> AsyncIterator[Adaptive]:
    harness = ReloadHarness(tmp_path)
    async with harness.open():
        yield Adaptive(harness)


async def test_a_change_is_made_beside_and_stays_for_later_starts(adaptive: Adaptive) -> None:
    assert await adaptive.adapt(slots(8))
    assert adaptive.running == [8]
    assert adaptive.emitted("model.adapted") == [(1, 8)]
    assert adaptive.harness.traffic.admitted == {"chat.0~2"}
    replica = adaptive.harness.fleet.models["chat"].at(0)
    assert replica.planner is adaptive.harness.fleet.planner
    assert not await adaptive.adapt(slots(8))


async def test_two_changes_are_a_minute_apart(adaptive: Adaptive) -> None:
    await adaptive.adapt(slots(8))
    await until_settled(adaptive)
    adaptive.now_s = 59
    assert not await adaptive.adapt(slots(2))
    adaptive.now_s = 61
    assert await adaptive.adapt(slots(2))
    assert adaptive.running == [2]


async def test_adapted_values_outlive_a_reload(adaptive: Adaptive) -> None:
    await adaptive.adapt(slots(8))
    done = await adaptive.harness.reload(*GOOD, "--fault", "flood-stderr=1")
    assert done.difference.changed
    assert adaptive.running == [8]


async def test_all_instances_are_changed_one_after_another(adaptive: Adaptive) -> None:
    adaptive.harness.settings = settings(GOOD, replicas=2)
    await adaptive.harness.triggers.start(dry_run=False)
    await adaptive.harness.until_ready("chat.1")
    await adaptive.adapt(slots(2))
    assert adaptive.running == [2, 2]
    assert adaptive.emitted("model.adapted") == [(1, 2)]


async def test_a_change_that_is_not_urgent_waits_for_an_idle_moment(adaptive: Adaptive) -> None:
    adaptive.demand_now = ModelDemand(waiting=0, working=1, idle_since_s=0, cached_tokens=0)
    assert not await adaptive.adapt(slots(2, is_urgent=False))
    adaptive.demand_now = ModelDemand(waiting=0, working=0, idle_since_s=0, cached_tokens=0)
    assert await adaptive.adapt(slots(2, is_urgent=False))
    assert adaptive.running == [2]


@pytest.mark.parametrize("fault", ["no memory", "it fails"])
async def test_what_failed_changes_nothing_and_is_tried_later_and_later(
    adaptive: Adaptive, fault: str
) -> None:
    if fault == "no memory":
        adaptive.harness.available_bytes = 0
    else:
        adaptive.harness.programs[8] = BROKEN
    assert await adaptive.adapt(slots(8))
    assert adaptive.running == [1]
    assert not adaptive.harness.adapted.get("chat")
    assert adaptive.harness.traffic.admitted == {"chat.0"}
    adaptive.now_s = 59
    assert not await adaptive.adapt(slots(8))
    adaptive.now_s = 61
    await until_settled(adaptive)
    assert await adaptive.adapt(slots(8))
    adaptive.now_s = 61 + 119
    await until_settled(adaptive)
    assert not await adaptive.adapt(slots(8))
    adaptive.now_s = 61 + 121
    adaptive.harness.available_bytes = 1 << 50
    adaptive.harness.programs.clear()
    assert await adaptive.adapt(slots(8))
    assert adaptive.running == [8]
    assert adaptive.emitted("model.adapt_failed") == [(1, 8), (1, 8)]


async def until_settled(adaptive: Adaptive) -> None:
    """Wait until nothing retires."""
    model = adaptive.harness.fleet.models["chat"]
    for replica in model.retiring:
        if replica.life:
            await asyncio.wait([replica.life])
    for _ in range(10):  # its task has still to forget it
        await asyncio.sleep(0)
    assert not model.retiring


@pytest.mark.parametrize("state", ["stopped", "reload", "memory wanted", "retiring"])
async def test_nothing_is_changed_meanwhile(adaptive: Adaptive, state: str) -> None:
    harness = adaptive.harness
    if state == "stopped":
        harness.fleet.command("stop")
        await harness.fleet.all_down()
    elif state == "memory wanted":
        adaptive.is_memory_wanted = True
    elif state == "retiring":
        harness.traffic.may_drain.clear()
        await adaptive.adapt(slots(2))
        adaptive.now_s = 61
    before = adaptive.running
    if state == "reload":
        async with harness.replacer.lock:
            await adaptive.adapt(slots(8))
    else:
        assert not await adaptive.adapt(slots(8))
    harness.traffic.may_drain.set()
    assert adaptive.running == before
    assert adaptive.emitted("model.adapt_failed") == []


async def test_a_model_that_is_stopped_while_it_is_changed_stays_down(adaptive: Adaptive) -> None:
    harness = adaptive.harness
    harness.programs[8] = (*GOOD, "--fault", "silent-load")
    async with asyncio.TaskGroup() as group:
        with harness.stream.listen() as listener:
            changing = group.create_task(adaptive.adapt(slots(8)))
            while (await listener.next()).fields.get("instance") != "chat.0~2":
                pass
        harness.fleet.command("stop")
    assert changing.result()
    await harness.fleet.all_down()
    assert not harness.adapted.get("chat")
    assert adaptive.emitted("model.adapt_failed") == []
    assert all(replica.instance.snapshot().pid is None for replica in harness.fleet.all_replicas())


async def test_values_end_with_the_run_of_an_instance(adaptive: Adaptive) -> None:
    harness = adaptive.harness
    await adaptive.adapt(slots(8))
    assert harness.adapted["chat"]
    harness.fleet.command("stop")
    await harness.fleet.all_down()
    await adaptive.adapt()
    assert not harness.adapted.get("chat")
    harness.fleet.command("start")
    await harness.fleet.models["chat"].at(0).instance.wait(frozenset({State.READY}))
    assert adaptive.running == [1]


async def test_an_instance_that_missed_a_change_is_changed_when_idle(adaptive: Adaptive) -> None:
    harness = adaptive.harness
    harness.adapted["chat"] = {"parallel": Setting(4, "demand", "another instance has it")}
    assert await adaptive.adapt()
    assert adaptive.running == [4]


async def test_slots_grow_by_demand_and_come_back(adaptive: Adaptive) -> None:
    adaptive.demand_now = ModelDemand(waiting=3, working=1, idle_since_s=0, cached_tokens=0)
    for adaptive.now_s in range(0, 60, 5):
        assert not await adaptive.adapt()
    adaptive.now_s = 60
    assert await adaptive.adapt()
    assert adaptive.running == [2]
    await until_settled(adaptive)
    adaptive.demand_now = ModelDemand(waiting=0, working=0, idle_since_s=0, cached_tokens=0)
    for adaptive.now_s in range(65, 665, 5):
        assert not await adaptive.adapt()
    adaptive.now_s = 665
    assert await adaptive.adapt()
    assert adaptive.running == [1]
    assert adaptive.emitted("model.adapted") == [(1, 2), (2, 1)]
    assert harness_reasons(adaptive)[-1] == "at most 0 of 2 slots in use for 600 s"


def harness_reasons(adaptive: Adaptive) -> list[object]:
    return [fields["reason"] for name, fields in adaptive.harness.events if name == "model.adapted"]
