"""When an answer shows that an engine did not use what it was given back."""

import pytest

from supervisor.slot_store.verify import CacheObservation, is_doubtful, is_unused


@pytest.mark.parametrize(("cached", "doubtful"), [(0, True), (499, True), (500, False)])
def test_half_of_it_leaves_no_doubt(cached: int, doubtful: bool) -> None:  # noqa: FBT001
    assert is_doubtful(1000, CacheObservation(1010, cached)) is doubtful


def test_what_was_asked_for_again_and_computed_anew_was_not_used() -> None:
    assert is_unused(1000, CacheObservation(1010, 20), 256)


def test_what_was_put_otherwise_than_before_proves_nothing() -> None:
    """A template that tells the date has other tokens on the next day."""
    assert not is_unused(30, CacheObservation(1010, 30), 256)
    assert not is_unused(300, CacheObservation(1010, 200), 256)
    assert not is_unused(255, CacheObservation(1010, 0), 256)


def test_an_answer_that_is_given_again_was_no_part_of_the_prompt() -> None:
    assert not is_doubtful(340, CacheObservation(91, 90))
    assert not is_unused(340, CacheObservation(91, 90), 64)
    assert not is_unused(340, CacheObservation(63, 0), 64)
