from __future__ import annotations

import pytest

from proxy.router.estimator import PromptLength, PromptTokens
from proxy.upstream.upstream import Timings


def answered(cached: int, computed: int) -> Timings:
    return Timings(cached, computed, 100.0, 10, 100.0)


def test_without_an_answer_the_length_is_all_that_is_known() -> None:
    tokens = PromptTokens()
    assert tokens.whole(PromptLength(100)) == 100
    assert tokens.new(PromptLength(100, 60)) == 40


def test_a_tokenizer_and_a_template_are_learned() -> None:
    tokens = PromptTokens()
    for estimated in (50, 500, 2000, 100, 1000, 300) * 3:
        tokens.note(PromptLength(estimated), answered(0, 20 + round(0.6 * estimated)))
    assert tokens.whole(PromptLength(1000)) == pytest.approx(620, rel=0.05)
    assert tokens.new(PromptLength(1000, 950)) < 80


def test_a_cache_that_forgets_is_not_counted_on() -> None:
    tokens = PromptTokens()
    for _ in range(5):
        tokens.note(PromptLength(1000, 900), answered(0, 1000))
    assert tokens.new(PromptLength(1000, 900)) == pytest.approx(1000, rel=0.1)
    for _ in range(8):
        tokens.note(PromptLength(1000, 900), answered(900, 100))
    assert tokens.new(PromptLength(1000, 900)) == pytest.approx(100, rel=0.3)


def test_no_more_is_computed_than_there_is() -> None:
    tokens = PromptTokens()
    tokens.note(PromptLength(10), answered(0, 40))
    length = PromptLength(10, 0)
    assert 1 <= tokens.new(length) <= tokens.whole(length)
