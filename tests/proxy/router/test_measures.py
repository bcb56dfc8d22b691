"""What finished requests teach of an engine: here 0.002 s a token of a prompt."""

from __future__ import annotations

import random

import pytest

from proxy.router.forecast import prompt_row
from proxy.router.measures import Finished, ModelMeasures, Span

TOKEN_S, PASS_S = 0.002, 0.02


def span(tokens: int, at_s: float = 0.0, takes: float = 1.0, decoded: int = 20) -> Span:
    first_s = at_s + tokens * TOKEN_S * takes
    return Span(at_s, first_s, first_s + decoded * PASS_S, tokens, 0, decoded)


def done(span: Span) -> Finished:
    return span, None, 0.01


def test_nothing_is_known_before_the_first_response() -> None:
    assert ModelMeasures().costs() is None


def test_prompts_alone_and_their_answers_are_measured() -> None:
    rng = random.Random(1)  # noqa: S311 (samples, no secret)
    measures = ModelMeasures()
    for _ in range(30):
        measures.note(done(span(rng.randint(20, 3000))))
    costs = measures.costs()
    assert costs
    assert costs.prompt_s(prompt_row(1000, 0, 2048)) == pytest.approx(2.0, rel=0.05)
    assert costs.answer_s((1, 1, 500)) == pytest.approx(PASS_S, rel=0.1)
    assert costs.overhead_s == pytest.approx(0.01)


def test_two_prompts_at_once_do_not_make_an_engine_seem_slow() -> None:
    measures = ModelMeasures()
    for tokens in (500, 1500, 800, 2500) * 4:
        both = span(tokens, takes=2.0)
        measures.note(done(both), (both,))
    costs = measures.costs()
    assert costs
    assert costs.prompt_s(prompt_row(1000, 0, 2048)) == pytest.approx(2.0, rel=0.1)


def test_a_prompt_beside_an_answer_is_no_time_of_the_answer() -> None:
    measures = ModelMeasures()
    for _ in range(10):
        measures.note(done(span(500)))
    answer = Span(0.0, 1.0, 1.0 + 20 * PASS_S + 1.0, 500, 0, 20)
    beside = Span(1.2, 2.2, 2.3, 500, 0, 2)
    for _ in range(20):
        measures.note(done(answer), (beside,))
    costs = measures.costs()
    assert costs
    assert costs.answer_s((1, 1, 500)) == pytest.approx(PASS_S, rel=0.2)


def test_an_instance_of_half_the_speed_measures_the_same() -> None:
    measures = ModelMeasures()
    for tokens in (300, 900, 2000) * 5:
        measures.note(done(span(tokens, takes=2.0)), (), 0.5)
    costs = measures.costs()
    assert costs
    assert costs.prompt_s(prompt_row(1000, 0, 2048)) == pytest.approx(2.0, rel=0.1)
