"""A short simulation: its facts, never its times."""

from __future__ import annotations

import pytest

from scripts.simulation.outcome import fairness, simulate
from scripts.simulation.run import Case


def test_every_request_is_answered_and_most_of_each_prompt_is_found() -> None:
    case = Case(nodes=8, conversations=250, seed=3)
    facts = simulate(case).facts
    assert (facts["lost"], facts["failed"]) == (0, 0)
    assert 1.0 <= facts["of ideal"] < 1.8
    assert facts["nodes"] > 0.7
    assert facts["clients"] > 0.8
    least_busy = simulate(Case(8, 250, 3, policy="least-busy")).facts
    assert least_busy["of ideal"] > 1.3 * facts["of ideal"]


def test_a_lost_node_costs_its_cached_tokens_and_no_request() -> None:
    case = Case(nodes=4, conversations=250, seed=3, loses_node=True)
    facts = simulate(case).facts
    assert (facts["lost"], facts["failed"]) == (0, 0)
    assert 0 < facts["repeated"] < 0.3 * facts["prefilled"]
    assert 0 < facts["retried"] + facts["cut"] <= 4
    assert simulate(case).facts == facts  # the same for a seed


def test_fairness_is_one_where_all_have_the_same() -> None:
    assert fairness([2, 2, 2]) == pytest.approx(1.0)
    assert fairness([5], 4) == pytest.approx(0.25)
