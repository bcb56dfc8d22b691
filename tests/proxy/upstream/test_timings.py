"""What instances say of their answers, and the averages of it."""

import pytest

from proxy.upstream.timings import Rates, Timings, average

SAID = {"cache_n": 7, "prompt_n": 100, "prompt_ms": 50.0, "predicted_n": 20, "predicted_ms": 400}


def test_timings_are_read_in_the_engines_words() -> None:
    assert Timings.read(SAID) == Timings(7, 100, 50.0, 20, 400.0)


def test_what_was_guessed_ahead_is_part_of_them() -> None:
    said = {**SAID, "draft_n": 12, "draft_n_accepted": 9}
    assert Timings.read(said) == Timings(7, 100, 50.0, 20, 400.0, 12, 9)


def test_acceptance_moves_with_answers_in_which_something_was_guessed() -> None:
    none = Rates().after(Timings(0, 100, 100.0, 10, 1000.0))
    assert none.acceptance is None
    first = none.after(Timings(0, 100, 100.0, 10, 1000.0, 10, 5))
    assert first.acceptance == 0.5
    assert first.after(Timings(0, 100, 100.0, 10, 1000.0)).acceptance == 0.5
    second = first.after(Timings(0, 100, 100.0, 10, 1000.0, 10, 10))
    assert second.acceptance
    assert 0.5 < second.acceptance < 1


@pytest.mark.parametrize(
    "said", [None, [], "x", {**SAID, "cache_n": "7"}, {**SAID, "prompt_n": -1}]
)
def test_what_are_no_timings_are_none(said: object) -> None:
    assert Timings.read(said) is None


def test_the_first_answer_replaces_the_guess_and_later_ones_move_it() -> None:
    first = Rates().after(Timings(0, 100, 100.0, 10, 1000.0))
    assert (first.prefill_tps, first.decode_tps) == (1000.0, 10.0)
    second = first.after(Timings(0, 200, 100.0, 20, 1000.0))
    assert 1000.0 < second.prefill_tps < 2000.0
    assert 10.0 < second.decode_tps < 20.0
    assert second.answers == 2


def test_a_prompt_that_was_cached_says_nothing_of_the_rate() -> None:
    before = Rates()
    after = before.after(Timings(500, 1, 30.0, 1, 30.0))
    assert (after.prefill_tps, after.decode_tps) == (before.prefill_tps, before.decode_tps)


def test_an_average_goes_towards_the_newest_figure() -> None:
    assert 10.0 < average(10.0, 20.0) < 15.0
