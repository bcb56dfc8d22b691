"""The averages of instances' timings."""

from __future__ import annotations

from proxy.upstream.upstream import Measurement, Rates, Timings


def test_acceptance_moves_with_answers_in_which_something_was_guessed() -> None:
    none = Rates().after(Timings(0, 100, 100.0, 10, 1000.0))
    assert none.acceptance is None
    first = none.after(Timings(0, 100, 100.0, 10, 1000.0, 10, 5))
    assert first.acceptance == 0.5
    assert first.after(Timings(0, 100, 100.0, 10, 1000.0)).acceptance == 0.5
    second = first.after(Timings(0, 100, 100.0, 10, 1000.0, 10, 10))
    assert second.acceptance
    assert 0.5 < second.acceptance < 1


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


def test_responses_are_measured_beside_how_many_they_ran() -> None:
    timings = Timings(0, 100, 100.0, 10, 200.0)
    rates = Rates().after(timings, 3, 5.0)
    assert rates.latency == {1: Measurement(20.0, 10, 5.0)}
    short = rates.after(Timings(0, 100, 100.0, 3, 900.0), 3, 6.0)
    assert short.latency == rates.latency
