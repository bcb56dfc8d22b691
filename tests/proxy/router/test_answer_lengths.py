from __future__ import annotations

from proxy.router.measures import AnswerLengths


def lengths(*known: tuple[int, int | None]) -> AnswerLengths:
    found = AnswerLengths()
    for decoded, limit in known:
        found.note(decoded, limit)
    return found


def test_an_answer_is_as_long_as_the_median() -> None:
    known = lengths((10, None), (20, None), (300, None))
    assert known.expected(None) == 20
    assert known.expected(15) == 15
    assert known.expected(None, decoded_tokens=5) == 15


def test_an_answer_that_is_longer_than_most_is_compared_with_the_long_ones() -> None:
    known = lengths((10, None), (20, None), (300, None))
    assert known.expected(None, decoded_tokens=100) == 200
    assert known.expected(None, decoded_tokens=400) == 200  # half as long again


def test_answers_that_their_limit_ended_say_that_others_reach_theirs() -> None:
    known = lengths((16, 16), (16, 16), (16, 16))
    assert known.expected(64) == 64
    assert known.expected(64, decoded_tokens=60) == 4
    assert known.expected(64, decoded_tokens=64) == 1
