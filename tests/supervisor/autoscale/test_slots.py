"""More slots where requests queue, fewer where it is quiet, and nothing in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import engine

from supervisor.autoscale.slots import Demand, WantedSlots, decide_slots, most_slots
from supervisor.builds.discover import Engine
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.schema import Settings
from supervisor.settings.tables import SlotSettings
from supervisor.system.paths import Directories

LIMITS = SlotSettings(queued_s=60, quiet_s=600)
# Slots of an instance: now, planned, and at most.
PLANNED = (4, 4, 16)
GROWN = (16, 4, 16)


def history(
    seconds: int, *, waiting: Sequence[int] = (0,), busy: int = 0, slots: int = 4
) -> list[Demand]:
    """Samples every 5 s; `waiting` repeats."""
    return [
        Demand(1000.0 + 5 * i, waiting[i % len(waiting)], busy, slots)
        for i in range(seconds // 5 + 1)
    ]


def decide(
    seen: Sequence[Demand], counts: tuple[int, int, int], limits: SlotSettings
) -> WantedSlots | None:
    now, planned, most = counts
    limits = limits.model_copy(update={"max": most})
    return decide_slots(seen, limits, now=now, planned=planned)


def count(found: WantedSlots | None) -> int | None:
    return found[0] if found else None


def test_requests_that_queue_for_a_minute_get_twice_the_slots() -> None:
    found = decide(history(60, waiting=(4,), busy=4), PLANNED, LIMITS)
    assert found == (8, "requests queued for 60 s with 4 slots")


@pytest.mark.parametrize(
    "seen",
    [
        [],
        history(55, waiting=(9,), busy=4),
        history(600, waiting=(9, 0), busy=4),
        [*history(60, waiting=(9,), busy=4), *history(20, busy=4)],
        history(600, busy=4),
    ],
    ids=["nothing seen", "less than a minute", "now and then", "no longer", "no queue"],
)
def test_otherwise_the_slots_stay(seen: list[Demand]) -> None:
    seen = [Demand(1000.0 + 5 * i, entry.waiting, entry.busy, 4) for i, entry in enumerate(seen)]
    assert decide(seen, PLANNED, LIMITS) is None


def test_a_moment_without_a_queue_does_not_start_the_minute_again() -> None:
    seen = history(60, waiting=(4,) * 12 + (0,), busy=4)
    assert count(decide(seen, PLANNED, LIMITS)) == 8


def test_there_are_never_more_slots_than_set() -> None:
    queued = history(60, waiting=(40,), busy=12)
    assert count(decide(queued, (8, 4, 12), LIMITS)) == 12
    assert decide(queued, (12, 4, 12), LIMITS) is None
    assert decide(queued, (4, 4, 2), LIMITS) is None


@pytest.mark.parametrize(("busy", "expected"), [(0, 4), (2, 4), (4, 4), (5, 8), (8, 8), (9, None)])
def test_after_a_quiet_time_as_many_stay_as_were_in_use(busy: int, expected: int | None) -> None:
    assert count(decide(history(600, busy=busy, slots=16), GROWN, LIMITS)) == expected


def test_the_slots_of_all_instances_count() -> None:
    two_instances = history(600, busy=16, slots=32)
    assert count(decide(two_instances, GROWN, LIMITS)) == 8


def test_a_queue_or_a_short_time_is_not_quiet() -> None:
    assert decide(history(595, slots=16), GROWN, LIMITS) is None
    once = history(600, waiting=(1, *[0] * 200), slots=16)
    assert decide(once, GROWN, LIMITS) is None


def test_there_are_never_fewer_slots_than_planned() -> None:
    assert decide(history(6000), PLANNED, LIMITS) is None
    assert count(decide(history(600, slots=6), (6, 4, 16), LIMITS)) == 4


def test_changed_settings_bring_the_slots_back() -> None:
    off = SlotSettings(follow_demand=False)
    assert count(decide(history(5, waiting=(9,), busy=16), GROWN, off)) == 4
    assert decide(history(60, waiting=(9,), busy=4), PLANNED, off) is None
    assert count(decide(history(5, slots=16), (16, 4, 8), LIMITS)) == 8


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=150),
    st.sampled_from([4, 8, 16]),
)
def test_a_decision_is_within_bounds_and_is_not_undone_at_once(
    seen: list[tuple[int, int]], now: int
) -> None:
    samples = [Demand(5.0 * i, waiting, busy, now) for i, (waiting, busy) in enumerate(seen)]
    found = decide(samples, (now, 4, 16), LIMITS)
    if found:
        assert 4 <= found[0] <= 16
        assert found[0] != now
        # The same demand with the new slots, for as long.
        after = [Demand(sample.at_s, sample.waiting, sample.busy, found[0]) for sample in samples]
        again = decide(after, (found[0], 4, 16), LIMITS)
        assert again is None or (again[0] > found[0]) == (found[0] > now)


def test_the_history_that_settings_ask_for_is_bounded() -> None:
    with pytest.raises(ValueError, match="500 times"):
        SlotSettings(queued_s=0.1, quiet_s=600)
    shortest = SlotSettings(queued_s=0.1, quiet_s=50)
    assert shortest.quiet_s / shortest.sample_s < 10_000


class FixedPlanner(LaunchPlanner):
    """Plans for an engine that need not run."""

    def engine(self) -> Engine:
        return engine()


@pytest.mark.parametrize(
    ("model", "supervisor", "expected"),
    [
        ({}, {}, 16),
        ({"slots": {"max": 6}}, {}, 6),
        ({"slots": {"max": 2}}, {}, 4),
        ({}, {"memory_budget": "36 MiB"}, 8),
        ({"slots": {"follow_demand": False}}, {}, None),
        ({}, {"adaptive": False}, None),
        ({"flags": {"parallel": 4}}, {}, None),
        ({"flags": {"parallel": "auto", "ctx-size": "auto"}}, {}, 16),
        ({"flags": {"ctx-size": 4096}}, {}, None),
        ({"flags": {"kv-unified": True}}, {}, None),
        ({"flags": {"embedding": True}}, {}, None),
        ({"profile": "high-throughput"}, {}, None),
        ({"trial": {"profile": "base", "share": 0.5}}, {}, None),
    ],
    ids=str,
)
def test_the_slots_of_some_models_follow_demand(
    tmp_path: Path,
    tiny_model: Path,
    model: dict[str, Any],
    supervisor: dict[str, Any],
    expected: int | None,
) -> None:
    settings = Settings(models={"chat": {"path": tiny_model, **model}}, supervisor=supervisor)
    planner = FixedPlanner(settings, Directories(*[tmp_path] * 5))
    assert most_slots(planner, "chat") == expected
