"""Searches on a simulated machine: their results, and their time."""

from __future__ import annotations

import pytest
from support.simulated_machine import Machine, change

from supervisor.bench.tune_search import BaseFailed

SPACE = [change(axis, value) for axis in "abcdefgh" for value in (1, 2)]
GAINS = {("a", 1): 1.3, ("b", 1): 1.05, ("c", 2): 1.04, ("d", 1): 0.8}
TOO_MANY_THREADS = change("threads", 64)


async def test_what_helps_is_found_and_combined() -> None:
    machine = Machine(GAINS, noise=0.02, drift_per_min=0.05)
    found = await machine.best(*SPACE)
    assert found.winner
    assert machine.speed(found.winner) > 1.35
    assert found.comparison
    assert found.comparison.low < machine.speed(found.winner) < found.comparison.high
    assert "faster" in found.comparison.verdict


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
async def test_variants_equal_to_the_base_never_win_in_19_of_20_runs(noise: float) -> None:
    wins = 0
    for seed in range(20):
        machine = Machine(noise=noise, drift_per_min=-0.1, seed=seed)
        found = await machine.best(change("a"), change("b"), seed=seed)
        wins += found.winner is not None
    assert wins <= 1


async def test_a_bad_variant_is_never_picked() -> None:
    """Not even if it is measured first, on a noisy machine."""
    for seed in range(20):
        machine = Machine({("threads", 64): 0.1, ("a", 2): 0.7}, noise=0.1, seed=seed)
        found = await machine.best(TOO_MANY_THREADS, *SPACE, seed=seed)
        assert found.winner is None or machine.speed(found.winner) >= 1
        assert machine.measured.count(TOO_MANY_THREADS.name) <= 1


async def test_two_seeds_find_results_equivalent_within_5_percent() -> None:
    speeds = []
    for seed in range(20):
        machine = Machine(GAINS, noise=0.02, seed=seed)
        found = await machine.best(*SPACE, seed=seed)
        assert found.winner
        speeds.append(machine.speed(found.winner))
    assert sum(max(speeds) / speed < 1.051 for speed in speeds) >= 19


@pytest.mark.parametrize("takes_s", [0.01, 3.0, 40.0, 90.0])
@pytest.mark.parametrize("budget_s", [60.0, 300.0])
async def test_it_ends_in_time_with_measurements_of_any_length(
    takes_s: float, budget_s: float
) -> None:
    stuck = frozenset({SPACE[0].name, SPACE[5].name})
    machine = Machine(GAINS, takes_s=takes_s, stuck=stuck)
    try:
        found = await machine.best(*SPACE, budget_s=budget_s)
    except BaseFailed:
        assert takes_s > budget_s * 0.2
    else:
        assert found.winner is None or found.winner.name not in stuck
    assert machine.now_s - 100 <= budget_s


async def test_a_variant_that_never_finishes_is_given_up_at_its_limit() -> None:
    machine = Machine(GAINS, stuck=frozenset({SPACE[0].name}))
    search = machine.search(*SPACE)
    await search.run()
    assert machine.measured.count(SPACE[0].name) == 1
    (trial,) = [trial for trial in search.trials if trial.variant == SPACE[0]]
    assert trial.failure == "it took longer than 17 s"


async def test_a_measurement_that_the_end_of_the_time_cuts_says_nothing_of_its_variant() -> None:
    for seed in range(20):
        machine = Machine({("a", 1): 1.5}, noise=0.01, takes_noise=0.3, seed=seed)
        found = await machine.best(change("a"), budget_s=90, seed=seed)
        assert found.winner == change("a")


async def test_a_base_that_never_finishes_is_an_error() -> None:
    machine = Machine(takes_s=1000)
    with pytest.raises(BaseFailed, match="longer than 120 s"):
        await machine.best(*SPACE)


async def test_what_was_not_tried_is_tried_while_nothing_helps() -> None:
    machine = Machine({("h", 2): 1.5}, noise=0.01)
    found = await machine.best(*SPACE, budget_s=220)
    assert found.winner == SPACE[-1]


async def test_what_there_is_no_time_for_is_named() -> None:
    found = await Machine(GAINS).best(*SPACE, budget_s=60)
    assert found.untried
    assert set(found.untried) <= set(SPACE)
    assert SPACE[0] not in found.untried


async def test_a_variant_whose_quality_is_rejected_does_not_win() -> None:
    machine = Machine(
        {("a", 1): 2.0, ("b", 1): 1.2},
        noise=0.01,
        rejected={"a 1": "wrong", "a 1, b 1": "wrong"},
    )
    found = await machine.best(change("a"), change("b"))
    assert found.winner == change("b")


async def test_less_memory_wins_where_memory_is_the_goal() -> None:
    machine = Machine({("a", 1): 1.5}, noise=0.001)
    found = await machine.search(change("a"), change("b"), goal="memory").run()
    assert found.winner == change("a")
    assert found.comparison
    assert found.comparison.verdict.endswith(")")
    assert "less" in found.comparison.verdict


async def test_less_memory_does_not_win_where_it_costs_too_much_speed() -> None:
    machine = Machine({("a", 1): 1.5}, {("a", 1): 0.5}, noise=0.001)
    search = machine.search(change("a"), goal="memory")
    found = await search.run()
    assert found.winner is None
    (trial,) = [trial for trial in search.trials if trial.variant == change("a")]
    assert trial.failure == "it decodes at 0.75 of the speed"
