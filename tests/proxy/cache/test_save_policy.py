from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from proxy.cache.save_policy import ReturnRates


def test_half_are_believed_to_return_before_anything_is_known() -> None:
    rates = ReturnRates()
    assert rates.return_p(1, 0.0) == 0.5
    assert not rates.note_turn(1, 0.0, 2.0, 100)
    assert 0.45 < rates.return_p(1, 2.5) <= 0.5


def test_where_each_conversation_has_one_turn_few_are_believed_to_return() -> None:
    rates = ReturnRates()
    for number in range(48):
        rates.note_turn(number, 1.0 * number, 1.0 * number + 1, 100)
    assert rates.return_p(47, 48.0) < 0.08
    assert rates.return_p(0, 48.0) < 0.05


def test_what_ended_just_now_does_not_count_as_gone() -> None:
    rates = ReturnRates()
    for number in range(48):
        rates.note_turn(number, 0.0, 0.01 * number, 100)
    assert rates.return_p(47, 0.5) > 0.3


def test_where_conversations_go_on_most_are_believed_to_return() -> None:
    rates = ReturnRates()
    for turn in range(5):
        for number in range(24):
            at_s = 30.0 * turn + number
            assert rates.note_turn(number, at_s, at_s + 1, 100) == (100 if turn else None)
    assert 20 < rates.return_s < 35
    assert rates.return_p(23, 144.5) > 0.7


def test_conversations_are_told_apart_by_their_turns() -> None:
    """Of hundreds that begin, each fourth goes on, and then to the end."""
    rates, at_s = ReturnRates(), 0.0
    for number in range(200):
        for _ in range(6 if number % 4 == 0 else 1):
            rates.note_turn(number, at_s, at_s + 1, 100)
            at_s += 2
    rates.note_turn(1000, at_s, at_s, 100)
    rates.note_turn(1001, at_s, at_s, 100)
    rates.note_turn(1001, at_s + 1, at_s + 1, 100)
    assert rates.return_p(1000, at_s + 1) < 0.5
    assert rates.return_p(1001, at_s + 1) > 0.7


def test_a_conversation_that_is_long_away_is_less_likely_to_return() -> None:
    rates = ReturnRates()
    rates.note_turn(1, 0.0, 0.0, 100)
    soon, later = rates.return_p(1, 1.0), rates.return_p(1, 600.0)
    assert later < soon / 3
    assert rates.return_p(1, 1e9) == 0.02


def test_a_conversation_that_went_on_at_once_may_return_after_a_minute_too() -> None:
    rates = ReturnRates()
    for turn in range(30):
        rates.note_turn(1, 0.1 * turn, 0.1 * turn + 0.05, 100)
    assert rates.return_p(1, 63.0) > 0.2


@given(
    st.lists(st.tuples(st.integers(0, 900), st.floats(0, 1e5), st.floats(0, 1e5)), max_size=50),
    st.integers(0, 900),
    st.floats(-1e6, 1e6),
)
def test_a_chance_is_one(turns: list[tuple[int, float, float]], asked: int, now_s: float) -> None:
    rates = ReturnRates()
    for turn in turns:
        rates.note_turn(*turn, 100)
    assert 0 < rates.return_p(asked, now_s) < 1
    assert math.isfinite(rates.return_s)


def test_of_thousands_of_conversations_the_latest_are_remembered() -> None:
    rates = ReturnRates()
    for number in range(2000):
        rates.note_turn(number, number, number, 100)
    assert not rates.note_turn(0, 2000, 2000, 100)
    assert rates.note_turn(1999, 2000, 2000, 100)
    assert rates.return_p(1998, 2000) < 0.05


def test_the_last_turns_of_512_conversations_are_known() -> None:
    rates = ReturnRates()
    for number in range(600):
        rates.note_turn(number, 1.0 * number, 1.0 * number, 100)
    assert rates.note_turn(88, 600.0, 600.0, 200) == 100
    assert rates.note_turn(0, 600.0, 600.0, 200) is None
