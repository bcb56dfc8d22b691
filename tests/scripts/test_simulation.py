"""A short simulation: its facts, never its times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.simulation.engine import Machine
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


# Replicas of llm-d's benchmark, and its first requests, at their published rates.
REPLICA = Machine(64, 5000, 90, 0.04, cache_tokens=307_328, is_paged=True)
BEGINNING = Case(8, 0, 3, stages=((15, 50), (15, 10)), machine=REPLICA)


def test_shared_prefixes_are_found_as_an_oracle_finds_them() -> None:
    ours, best, least_busy = (
        simulate(replace(BEGINNING, policy=policy)).facts
        for policy in ("affinity", "oracle", "least-busy")
    )
    assert ours["failed"] == 0
    assert ours["prefilled"] < 1.2 * best["prefilled"] < 0.5 * least_busy["prefilled"]
    assert best["first token all"] <= ours["first token all"] < 0.5 * least_busy["first token all"]


def test_a_front_finds_what_another_one_sent_by_digests_alone() -> None:
    case = Case(8, 60, 3, fronts=2)
    cases = case, replace(case, has_digests=True), replace(case, is_sticky=True)
    unknown, told, same_front = (simulate(each).facts["found"] for each in cases)
    assert unknown < 0.7
    assert min(told, same_front) > 0.95


def test_fairness_is_one_where_all_have_the_same() -> None:
    assert fairness([2, 2, 2]) == pytest.approx(1.0)
    assert fairness([5], 4) == pytest.approx(0.25)
