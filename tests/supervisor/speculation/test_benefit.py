import pytest

from supervisor.speculation.benefit import (
    SpeculationConfig,
    SpeculationCost,
    Tokens,
    estimate_benefit,
)
from supervisor.speculation.trial import costs

ALONE = SpeculationConfig()
ITSELF = SpeculationConfig(own_share=0.5)


def test_acceptance_is_the_share_of_guesses_that_came_true() -> None:
    assert Tokens(100, 40, 10).acceptance == 0.25
    assert Tokens(100, 0, 0).acceptance is None
    assert Tokens(5, 4, 3) + Tokens(1, 1, 1) - Tokens(2, 2, 2) == Tokens(4, 3, 2)


def test_few_answers_are_no_reason_to_judge() -> None:
    assert estimate_benefit(ALONE, SpeculationCost(10, 1), Tokens(511, 100, 50)) is None
    assert estimate_benefit(ALONE, SpeculationCost(10, 1), Tokens(512, 100, 50))


@pytest.mark.parametrize(
    ("accepted", "draft_ms", "is_slower"), [(800, 2, False), (300, 2, False), (100, 8, True)]
)
def test_guessing_pays_when_what_comes_true_is_worth_what_it_costs(
    accepted: int, draft_ms: float, *, is_slower: bool
) -> None:
    verdict = estimate_benefit(ALONE, SpeculationCost(10, draft_ms), Tokens(1000, 1000, accepted))
    assert verdict
    assert verdict.with_tps == pytest.approx(
        1000 / (((1000 - accepted) * 10 + 1000 * draft_ms) / 1000)
    )
    assert (verdict.without_tps, verdict.is_estimate) == (100, False)
    assert verdict.is_slower is is_slower


def test_what_never_guessed_is_as_fast_as_without() -> None:
    verdict = estimate_benefit(ALONE, SpeculationCost(10, 5), Tokens(1000))
    assert verdict
    assert verdict.with_tps == verdict.without_tps
    assert not verdict.is_slower


def test_a_draft_that_reads_along_is_no_part_of_what_the_model_takes_alone() -> None:
    verdict = estimate_benefit(ITSELF, SpeculationCost(14, 8), Tokens(1000, 750, 750))
    assert verdict
    assert verdict.without_tps == pytest.approx(1000 / 7)
    assert verdict.is_estimate
    assert verdict.is_slower


def test_what_a_guess_costs_is_what_the_steps_leave_of_an_ordinary_answer() -> None:
    plain = [(Tokens(2), 90.0), (Tokens(2), 10.0), (Tokens(2), 8.0)]
    usual = (Tokens(65, 60, 44), 20 * 10 + 60 * 3.0)
    odd = [(Tokens(65, 60, 44), 1000.0), (Tokens(65, 60, 44), 100.0)]
    assert costs(plain, [*odd, usual]) == SpeculationCost(10, 3)


def test_an_answer_quicker_than_its_steps_makes_guesses_free() -> None:
    assert costs([(Tokens(2), 10.0)], [(Tokens(65, 60, 44), 190.0)]) == SpeculationCost(10, 0)


@pytest.mark.parametrize(
    ("plain", "guessed"),
    [
        ([], [(Tokens(64, 60, 44), 500.0)]),
        ([(Tokens(), 0.0)], [(Tokens(), 0.0)]),
        ([(Tokens(2), 10.0)], [(Tokens(64), 640.0)]),
        ([(Tokens(2, 1, 1), 10.0)], [(Tokens(64, 60, 44), 500.0)]),
    ],
    ids=["no time", "refused", "nothing guessed", "guesses where none should be"],
)
def test_without_both_kinds_of_answers_nothing_is_known(
    plain: list[tuple[Tokens, float]], guessed: list[tuple[Tokens, float]]
) -> None:
    assert costs(plain, guessed) is None
