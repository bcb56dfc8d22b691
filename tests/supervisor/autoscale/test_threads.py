"""Decisions over synthetic loads: readings of 5 s, with a program that comes and goes."""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping

import pytest
from support.samples import machine

from supervisor.autoscale.threads import HISTORY_S, LoadSample, ThreadsInputs, decide_threads
from supervisor.plan.setting import Setting
from supervisor.system.machine import Machine
from supervisor.system.processor_load import ProcessorLoad

STEP_S = 5.0
Load = Callable[[float], float | None]  # cores of other programs, by time
TWO = machine(physical_cores=2, logical_cores=2)


def square(period_s: float, cores: float = 1.0, *, from_s: float = 0) -> Load:
    return lambda at_s: cores if (at_s - from_s) % period_s < period_s / 2 else 0.0


def steady(cores: float | None) -> Load:
    return lambda _: cores


class Daemon:
    """Decides after each reading, and applies at once."""

    def __init__(
        self, here: Machine = TWO, current: int = 2, names: tuple[str, ...] = ("a",)
    ) -> None:
        self.here, self.current, self.names = here, current, names
        self.at_s = 0.0
        self.samples: deque[LoadSample] = deque(maxlen=int(HISTORY_S / STEP_S))
        self.changes: list[float] = []  # when
        self.speeds: Mapping[int, float] = {}
        self.setting = Setting(current, "machine")

    def run(
        self,
        span_s: float,
        others: Load,
        busy: Mapping[str, float] | None = None,
        pressure: float | None = None,
    ) -> "Daemon":
        for _ in range(round(span_s / STEP_S)):
            self.at_s += STEP_S
            load = ProcessorLoad(self.at_s, STEP_S, others(self.at_s - STEP_S / 2), pressure)
            self.samples.append(LoadSample(load, busy or {}))
            self.setting = decide_threads(
                ThreadsInputs(self.here, self.samples, self.names, self.current, self.speeds)
            )
            if self.setting.value != self.current:
                self.current = int(self.setting.value)
                self.changes.append(self.at_s)
        return self


def test_an_idle_machine_gives_all_performance_cores() -> None:
    here = machine(physical_cores=8, logical_cores=12, efficiency_cores=4)
    daemon = Daemon(here, current=1).run(180, steady(0))
    assert (daemon.current, len(daemon.changes)) == (4, 1)
    assert daemon.setting.reason == "4 performance cores, the machine is idle otherwise"


def test_efficiency_cores_decode_if_there_are_no_others() -> None:
    here = machine(physical_cores=4, efficiency_cores=4)
    assert Daemon(here, current=4).run(180, steady(0)).setting.reason.startswith("4 efficiency")


def test_before_the_machine_was_observed_nothing_changes() -> None:
    daemon = Daemon(current=1).run(60, steady(0))
    assert daemon.current == 1
    assert "not observed for long enough" in daemon.setting.reason


@pytest.mark.parametrize("cores", [1.0, 0.67, 0.5])
def test_one_busy_program_takes_a_core_within_20_s(cores: float) -> None:
    daemon = Daemon().run(300, steady(0)).run(120, steady(cores))
    assert daemon.current == 1
    assert daemon.changes in ([315], [320])
    assert daemon.setting.reason.startswith("1 of 2 physical cores: other programs take ")


def test_threads_come_back_within_minutes() -> None:
    daemon = Daemon().run(300, steady(0)).run(600, steady(1)).run(600, steady(0))
    assert daemon.current == 2
    left_at_s, back_at_s = daemon.changes[0], daemon.changes[-1]
    assert len(daemon.changes) == 2
    assert left_at_s <= 320
    assert 120 <= back_at_s - 900 <= 270


@pytest.mark.parametrize("span_s", [5, 10])
def test_a_short_load_changes_nothing(span_s: float) -> None:
    daemon = Daemon().run(300, steady(0)).run(span_s, steady(2)).run(300, steady(0))
    assert daemon.changes == []


@pytest.mark.parametrize("phase_s", [0, 2.5, 7])
@pytest.mark.parametrize("period_s", [7, 10, 20, 30, 40, 60, 90, 120, 180, 240, 300, 400])
def test_loads_that_come_and_go_change_the_threads_once_at_most(
    period_s: float, phase_s: float
) -> None:
    daemon = Daemon().run(3600, square(period_s, from_s=phase_s))
    assert len(daemon.changes) <= 1


@pytest.mark.parametrize("period_s", [600, 900, 1800])
def test_loads_of_many_minutes_change_them_twice_a_period(period_s: float) -> None:
    daemon = Daemon().run(4 * period_s, square(period_s))
    assert 6 <= len(daemon.changes) <= 8


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mean", [0.1, 0.3, 0.5, 0.7, 1.0, 1.5])
def test_noise_changes_them_seldom(seed: int, mean: float) -> None:
    noise = random.Random(seed)  # noqa: S311 (a load)
    daemon = Daemon().run(3600, lambda _: min(2.0, noise.expovariate(1 / mean)))
    assert len(daemon.changes) <= 4


@pytest.mark.parametrize("seed", range(5))
def test_noise_beside_a_load_changes_next_to_nothing(seed: int) -> None:
    noise = random.Random(seed)  # noqa: S311 (a load)
    daemon = Daemon(machine(physical_cores=8), 8)
    daemon.run(3600, lambda _: 2 + noise.gauss(0, 0.2))
    assert daemon.current == 6
    assert len(daemon.changes) <= 3


@pytest.mark.parametrize(("cores", "threads"), [(1, 7), (3.1, 5), (8, 1), (20, 1)])
def test_each_program_takes_a_core_and_one_is_left(cores: float, threads: int) -> None:
    assert Daemon(machine(physical_cores=8), 8).run(60, steady(cores)).current == threads


def test_cores_that_we_do_not_decode_on_are_there_for_others_first() -> None:
    hybrid = machine(physical_cores=8, efficiency_cores=4)
    assert Daemon(hybrid, 4).run(60, steady(4)).current == 4
    assert Daemon(hybrid, 4).run(60, steady(5)).current == 3
    quota = machine(physical_cores=4, quota_spare_cores=12)
    assert Daemon(quota, 4).run(60, steady(10)).current == 4
    assert Daemon(quota, 4).run(60, steady(14)).current == 2


def test_the_fastest_measured_number_is_used_if_cores_are_free() -> None:
    daemon = Daemon(machine(physical_cores=8), 8)
    daemon.speeds = {4: 30.0, 6: 34.0, 8: 31.0}
    assert daemon.run(180, steady(0)).current == 6
    assert daemon.setting.reason == "6 of 8 physical cores: measured fastest"
    assert daemon.run(60, steady(2)).current == 6
    assert daemon.run(60, steady(5)).current == 3


def test_unknown_load_is_estimated_by_pressure_and_else_changes_nothing() -> None:
    assert Daemon().run(60, steady(None), pressure=1.0).current == 1
    assert Daemon(current=1).run(600, steady(None)).current == 1
    assert Daemon(current=2).run(600, steady(None)).current == 2


def test_a_gap_in_the_readings_is_no_load() -> None:
    daemon = Daemon().run(300, steady(0)).run(10, steady(1)).run(5, steady(None))
    assert daemon.run(5, steady(1)).current == 1


# Instances of ours

BOTH: Mapping[str, float] = {"a": 1.0, "b": 1.0}


def test_instances_that_compute_at_the_same_time_share_the_cores() -> None:
    daemon = Daemon(machine(physical_cores=8), 8).run(60, steady(0), BOTH)
    assert daemon.current == 4
    text = "4 of 8 physical cores: 2 instances compute at the same time"
    assert daemon.setting.reason == text
    assert daemon.run(3600, steady(0), BOTH).current == 4


def test_instances_whose_threads_wait_for_each_other_share_the_cores() -> None:
    half = {"a": 0.5, "b": 0.5}
    assert Daemon().run(60, steady(0), half, pressure=0.9).current == 1
    # They alternate.
    assert Daemon().run(600, steady(0), half, pressure=0.1).current == 2


def test_an_instance_that_computes_alone_gets_all_cores() -> None:
    daemon = Daemon(machine(physical_cores=8), 4).run(180, steady(0), {"a": 1.0, "b": 0.02})
    assert daemon.current == 8
    assert Daemon(TWO, 1).run(180, steady(0)).current == 2


def test_shared_cores_come_back_when_the_other_instance_has_been_quiet() -> None:
    daemon = Daemon().run(60, steady(0), BOTH).run(240, steady(0), {"a": 1.0})
    assert daemon.current == 2
    assert len(daemon.changes) == 2


IDLE: Mapping[str, float] = {"a": 0.0, "b": 0.0}


def test_instances_that_are_not_used_keep_their_part_of_the_cores() -> None:
    daemon = Daemon(machine(physical_cores=8), 8).run(60, steady(0), BOTH)
    daemon.run(3600, steady(0), IDLE)
    assert daemon.current == 4
    assert daemon.run(90, steady(0), {"a": 1.0, "b": 0.0}).current == 8


def test_a_part_of_the_cores_comes_back_without_use() -> None:
    daemon = Daemon(machine(physical_cores=8), 4).run(60, steady(6), IDLE)
    assert daemon.current == 2
    assert daemon.run(600, steady(0), IDLE).current == 4


def test_replicas_of_one_model_share_only_while_both_compute() -> None:
    pair = ("a.0", "a.1")
    assert Daemon(TWO, 2, pair).run(60, steady(0), {"a.0": 1.0}).current == 2
    assert Daemon(TWO, 2, pair).run(60, steady(0), dict.fromkeys(pair, 1.0)).current == 1


def test_programs_and_instances_add_up() -> None:
    here = machine(physical_cores=8)
    daemon = Daemon(here, 8).run(60, steady(2), BOTH)
    assert daemon.current == 3
    assert "other programs take 2.0 cores and 2 instances" in daemon.setting.reason


def test_a_number_of_threads_is_never_below_one() -> None:
    one = machine(physical_cores=1, logical_cores=1)
    daemon = Daemon(one, 1).run(600, steady(1.0), dict.fromkeys("abcdef", 1.0), pressure=1.0)
    assert daemon.current == 1
    assert not math.isnan(float(daemon.current))
