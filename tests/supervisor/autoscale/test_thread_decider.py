"""Changes that the decider wants, from counters of a machine with two cores."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.samples import GPU, engine, machine, model

from supervisor.autoscale.slots import Change, ModelView
from supervisor.autoscale.threads import ThreadDecider
from supervisor.builds.discover import Engine
from supervisor.plan.plan import Plan, TrialSettings, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import Setting
from supervisor.settings.schema import ModelSettings
from supervisor.system.paths import shipped_directory
from supervisor.system.processor_load import ProcessorReading

TWO = machine(physical_cores=2, logical_cores=2)
PATH = Path("/models/chat.gguf")
TRIAL = TrialSettings(profile="base", share=0.5)


def planned(adapted: int | None = None, *, on: Engine | None = None, **flags: Any) -> Plan:
    entry = ModelEntry("chat", PATH, flags=flags)
    return make_plan(
        entry,
        load("base", [shipped_directory("profiles")]),
        on or engine(),
        model(),
        TWO,
        instances=1,
        adapted={"threads": Setting(adapted, "machine")} if adapted else {},
    )


class Simulation:
    """One model with one engine, whose process takes no time, and other programs."""

    def __init__(self, base: Plan | None = None, settings: ModelSettings | None = None) -> None:
        self.base = base or planned()
        self.settings = settings or ModelSettings(path=PATH)
        self.reading = ProcessorReading(1000, 0, 0, 0, {}, is_low_priority=False)
        self.plan, self.speeds = self.base, {1: 60.0, 2: 100.0}
        self.processes = [(7, "chat.0", 2)]
        self.asked: list[Collection[int]] = []
        self.changes: Sequence[Change] = ()
        self.is_measuring = False
        self.decider = ThreadDecider(
            lambda: self.processes,
            lambda _: self.speeds,
            is_measuring=lambda: self.is_measuring,
            read=self._read,
            read_machine=lambda: TWO,
        )
        self.decider.sample([self.view()])

    def _read(self, pids: Collection[int]) -> ProcessorReading:
        self.asked.append(pids)
        return replace(self.reading, own_s=dict.fromkeys(pids, 0.0))

    def view(self) -> ModelView:
        at_s = self.reading.at_s
        return ModelView("chat", at_s, 0, 0, {"chat.0": 7}, self.plan, self.base, self.settings)

    def run(self, span_s: float, cores: float, *, step_s: float = 5) -> Sequence[Change]:
        for _ in range(round(span_s / step_s)):
            busy_s = (self.reading.busy_s or 0) + cores * step_s
            self.reading = replace(self.reading, at_s=self.reading.at_s + step_s, busy_s=busy_s)
            self.decider.sample([self.view()])
            self.changes = self.decider.changes(self.view())
        return self.changes


def test_a_busy_program_takes_a_thread() -> None:
    (change,) = Simulation().run(20, 1)
    assert (change.key, change.is_urgent) == ("threads", False)
    assert change.to == Setting(1, "machine", change.reason)
    assert change.reason == "1 of 2 physical cores: other programs take 1.0 cores"


def test_what_a_bench_takes_changes_nothing() -> None:
    found = Simulation()
    found.run(20, 0)
    found.is_measuring = True
    assert found.run(120, 2) == ()
    found.is_measuring = False
    assert found.run(20, 0) == ()


def test_a_model_that_always_has_requests_is_changed_after_a_while() -> None:
    found = Simulation()
    found.run(20, 1)
    (change,) = found.run(15, 1)
    assert change.is_urgent


def test_the_planned_number_comes_back_without_an_adapted_one() -> None:
    found = Simulation()
    found.plan = planned(1)
    (change,) = found.run(300, 0)
    assert change.to is None
    assert change.reason == "2 physical cores, the machine is idle otherwise"


def test_a_change_that_was_made_is_not_wanted_again() -> None:
    found = Simulation()
    found.run(20, 1)
    found.plan = planned(1)
    assert found.run(60, 1) == ()


def test_the_measured_number_is_wanted() -> None:
    found = Simulation()
    found.speeds = {1: 135.0, 2: 32.0}
    (change,) = found.run(180, 0)
    assert change.to
    assert change.to.value == 1


@pytest.mark.parametrize(
    "found",
    [
        Simulation(planned(threads=2)),
        Simulation(planned(on=engine("b10434", GPU))),
        Simulation(planned(embedding=True)),
        Simulation(settings=ModelSettings(path=PATH, trial=TRIAL)),
    ],
    ids=["set by the user", "on a device", "embeddings", "on trial"],
)
def test_threads_that_are_not_ours_to_choose_stay(found: Simulation) -> None:
    assert found.run(60, 2) == ()


def test_counters_are_read_every_few_seconds_with_our_own_processes() -> None:
    found = Simulation()
    found.run(10, 0, step_s=1)
    assert len(found.asked) == 3
    assert all(7 in pids and len(pids) == 2 for pids in found.asked)


def test_without_a_model_nothing_is_read() -> None:
    found = Simulation()
    found.decider.sample([])
    found.decider.sample([])
    assert len(found.asked) == 1
