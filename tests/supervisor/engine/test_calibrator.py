"""The runs that measure: one for each thread count, then one with the fastest."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.corral_cli import PATIENCE_S
from support.instance_harness import InstanceHarness, fake_launch
from support.samples import engine, machine, model

from supervisor.engine import calibration
from supervisor.engine.calibration import MeasurementStore, ThreadCalibrator
from supervisor.engine.client import Endpoint, EngineClient
from supervisor.engine.states import State
from supervisor.plan.auto import ThreadSpeeds
from supervisor.plan.plan import Plan, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry
from supervisor.system.paths import shipped_directory
from supervisor.system.processor_load import ProcessorReading

# As measured on a host whose threads are slow to synchronise.
SPEEDS = {2: ThreadSpeeds(32, 850, 117), 1: ThreadSpeeds(135, 460, 294)}


@dataclass
class Replica:
    """Runs that never happen, on a machine of two cores whose speeds are known."""

    root: Path
    profile: str = "base"
    set_flags: Mapping[str, int] = field(default_factory=dict)
    alone: Sequence[bool] = ()
    others_cores: float = 0.0
    events: list[Mapping[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("model.gguf", "llama-server"):
            (self.root / name).write_bytes(b"content")
        self._answers = list(self.alone)
        self._seconds = itertools.count()
        self.plan = self.plan_again()
        self.calibrator = ThreadCalibrator(
            plan=lambda: self.plan,
            plan_again=self.plan_again,
            store=lambda _plan: self.store(),
            is_alone=lambda: self._answers.pop(0) if self._answers else True,
            read=self.read,
            emit=self.emit,
        )

    def emit(self, _name: str, /, **fields: object) -> None:
        self.events.append(fields)

    def read(self) -> ProcessorReading:
        at_s = next(self._seconds)
        return ProcessorReading(at_s, self.others_cores * at_s, 0, None, {}, is_low_priority=False)

    def store(self) -> MeasurementStore:
        return MeasurementStore(
            self.root / "cache",
            self.root / "model.gguf",
            self.root / "llama-server",
            machine(physical_cores=2),
        )

    def plan_again(self) -> Plan:
        return make_plan(
            ModelEntry("m", self.root / "model.gguf", flags=self.set_flags),
            load(self.profile, [shipped_directory("profiles")]),
            engine(),
            model(),
            machine(physical_cores=2),
            instances=1,
            measured=self.store().read(),
        )

    async def runs(self) -> list[tuple[str, str]]:
        """Start until a run serves; return `threads` and `threads-batch` of each."""
        found = []
        while True:
            self.plan = self.plan_again()
            found.append((self.flag("--threads"), self.flag("--threads-batch")))
            async with EngineClient(Endpoint(port=1), "") as client:
                if not await self.calibrator.needs_restart(client, len(found)):
                    return found

    def flag(self, name: str) -> str:
        return next(line.value or "" for line in self.plan.lines if line.flag == name)


@pytest.fixture(autouse=True)
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([SPEEDS[2], SPEEDS[1]])

    async def measure(_client: EngineClient, _slots: int) -> ThreadSpeeds | None:
        return next(measured)

    monkeypatch.setattr(calibration, "measure", measure)


async def test_each_count_gets_a_run_and_the_next_takes_the_fastest(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    assert await replica.runs() == [("2", "2"), ("1", "1"), ("1", "2")]
    assert [event["threads"] for event in replica.events] == [2, 1]
    assert await replica.runs() == [("1", "2")]


async def test_with_many_slots_batches_take_the_count_that_decodes_fastest(tmp_path: Path) -> None:
    replica = Replica(tmp_path, profile="high-throughput")
    assert (await replica.runs())[-1] == ("1", "1")


async def test_threads_that_the_user_set_are_not_measured(tmp_path: Path) -> None:
    replica = Replica(tmp_path, set_flags={"threads": 2})
    assert await replica.runs() == [("2", "2")]
    assert replica.events == []


@pytest.mark.parametrize(
    ("alone", "others_cores"), [([False], 0.0), ([True, False], 0.0), ([], 0.5)]
)
async def test_a_disturbed_measurement_is_not_used(
    tmp_path: Path, alone: Sequence[bool], others_cores: float
) -> None:
    replica = Replica(tmp_path, alone=alone, others_cores=others_cores)
    assert await replica.runs() == [("2", "2")]
    assert replica.store().read() == {}


async def test_a_disturbed_measurement_ends_in_all_cores_until_the_next_daemon(
    tmp_path: Path,
) -> None:
    replica = Replica(tmp_path, alone=[True, True, False])
    assert [threads for threads, _ in await replica.runs()] == ["2", "1", "2"]
    assert replica.store().read() == {}
    assert Replica(tmp_path).plan.untried_threads == 2


async def test_an_instance_that_is_measured_starts_again_and_counts_no_restart(
    runtime: Path,
) -> None:
    async def needs_restart(_client: EngineClient, run: int) -> bool:
        return run == 1

    harness = InstanceHarness(fake_launch(runtime), needs_restart=needs_restart)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(frozenset({State.READY}))
    assert harness.story[:6] == [
        *("starting", "warming", "stopping"),
        *("starting", "warming", "ready"),
    ]
    assert (facts.run, facts.restarts, facts.failures) == (2, 0, 0)
