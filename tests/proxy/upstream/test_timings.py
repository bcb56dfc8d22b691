"""The timings in instances' answers."""

import pytest

from proxy.upstream.upstream import Timings, average

SAID = {"cache_n": 7, "prompt_n": 100, "prompt_ms": 50.0, "predicted_n": 20, "predicted_ms": 400}


def test_timings_are_read_in_the_engines_words() -> None:
    assert Timings.read(SAID) == Timings(7, 100, 50.0, 20, 400.0)


def test_what_was_guessed_ahead_is_part_of_them() -> None:
    said = {**SAID, "draft_n": 12, "draft_n_accepted": 9}
    assert Timings.read(said) == Timings(7, 100, 50.0, 20, 400.0, 12, 9)


@pytest.mark.parametrize(
    "said", [None, [], "x", {**SAID, "cache_n": "7"}, {**SAID, "prompt_n": -1}]
)
def test_what_are_no_timings_are_none(said: object) -> None:
    assert Timings.read(said) is None


def test_an_average_goes_towards_the_newest_figure() -> None:
    assert 10.0 < average(10.0, 20.0) < 15.0
