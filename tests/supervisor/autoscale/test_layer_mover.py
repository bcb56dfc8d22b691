"""Layers that move by themselves, and the effect if they cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from supervisor.autoscale.layer_mover import LayerMover
from supervisor.engine.states import State
from supervisor.errors import OutOfMemory, SettingsInvalid
from supervisor.fleet.launches import ReplicaId
from supervisor.fleet.replace import Replacer
from supervisor.plan.resolve import SPLIT
from supervisor.rpc.address import WorkerAddress
from supervisor.rpc.relay import ShardRun
from supervisor.rpc.shards import LayerShares, ShardPlan, worker_split
from supervisor.settings.tables import LoadBalanceConfig


def slow_b() -> ShardRun:
    plans = [ShardPlan(WorkerAddress(name, "127.0.0.1", 1), 8, 0.0, 99) for name in "ab"]
    run = ShardRun(plans, LoadBalanceConfig(min_samples=1, eval_interval_secs=0))
    run.close()
    run.balancer.record("a", 800)
    run.balancer.record("b", 8000)
    return run


class Harness:
    """A fleet of one model, whose plans fit or not."""

    def __init__(self, tmp_path: Path, *, fits: bool = False) -> None:
        self.fits = fits
        self.now_s = 0.0
        self.planned: list[dict[str, int]] = []
        self.events: list[dict[str, Any]] = []
        self.run = slow_b()
        self.replica: Any = SimpleNamespace(
            place=ReplicaId("chat", 0), name="chat.0", shards=self.run
        )
        planner = SimpleNamespace(with_layers=self._with_layers)
        self.replica.instance = SimpleNamespace(snapshot=lambda: SimpleNamespace(state=State.READY))
        fleet = cast(
            "Any",
            SimpleNamespace(
                planner=planner,
                replicas=lambda: [self.replica],
                select=lambda _names: (),
                models={"chat": SimpleNamespace(at=lambda _number: None)},
                apply_settings=lambda *_: None,
            ),
        )
        fake: Any = SimpleNamespace(lock=asyncio.Lock(), replace=self._replace)
        replacer = fake if fits else Replacer(fleet)
        self.shares = LayerShares(tmp_path / "layers")
        self.mover = LayerMover(fleet, replacer, self.shares, self._emit, lambda: self.now_s)

    def _with_layers(self, _model: str, layers: dict[str, int]) -> Any:
        self.planned.append(layers)

        def plan_at(_place: ReplicaId) -> Any:
            if not self.fits:
                raise OutOfMemory("b has too little memory")
            device = SimpleNamespace(total_mib=1)
            workers: Any = [SimpleNamespace(name=name, devices=[device]) for name in "ab"]
            chosen = {SPLIT: worker_split(workers, layers)}
            inputs = SimpleNamespace(chosen=chosen)
            return SimpleNamespace(model="chat", workers=workers, memory_inputs=inputs)

        return SimpleNamespace(plan_at=plan_at)

    async def _replace(self, *_: object) -> None: ...

    def _emit(self, name: str, /, **fields: Any) -> None:
        self.events.append({"event": name, **fields})

    async def sample(self) -> None:
        await self.mover.sample(self.replica, self.run)


async def test_a_move_that_fails_is_reported_and_not_tried_again_for_an_hour(
    tmp_path: Path,
) -> None:
    """seed 000: automatic, beyond it"""
    harness = Harness(tmp_path)
    await harness.sample()
    assert harness.planned == [{"a": 15, "b": 1}]
    (event,) = harness.events
    assert event["event"] == "model.adapt_failed"
    assert (event["before"], event["after"]) == ("a 8, b 8", "a 15, b 1")
    assert event["reason"] == "b has too little memory"
    assert harness.shares.layers("chat", ["a", "b"], 16) is None
    harness.now_s = 3599.0
    await harness.sample()
    assert len(harness.planned) == 1
    harness.now_s = 3600.0
    await harness.sample()
    assert len(harness.planned) == 2


async def test_what_was_undone_is_not_moved_again_for_an_hour(
    tmp_path: Path,
) -> None:
    """seed 000: automatic, beyond it"""
    harness = Harness(tmp_path, fits=True)
    found = await harness.mover.undo("chat")
    assert isinstance(found, SettingsInvalid)
    assert "no layers of chat were moved" in found.message
    harness.shares.write("chat", {"a": 8, "b": 8}, {"a": 10, "b": 6})
    await harness.mover.undo("chat")
    (event,) = harness.events
    assert event["event"] == "model.adapted"
    assert (event["before"], event["after"]) == ("a 8, b 8", "a 10, b 6")
    harness.now_s = 3599.0
    await harness.sample()
    assert harness.planned == [{"a": 10, "b": 6}]
    harness.now_s = 3600.0
    await harness.sample()
    assert harness.planned == [{"a": 10, "b": 6}, {"a": 15, "b": 1}]


async def test_measurements_of_an_earlier_run_move_nothing(tmp_path: Path) -> None:
    """seed 000: beyond it"""
    harness = Harness(tmp_path)
    harness.replica.shards = None
    await harness.sample()
    assert harness.planned == []
    assert "started again" in harness.events[0]["reason"]
