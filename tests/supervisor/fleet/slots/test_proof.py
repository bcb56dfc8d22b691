"""When an answer shows that an engine did not use what it was given back."""

import pytest

from supervisor.fleet.slots.proof import is_disproved, is_doubtful


@pytest.mark.parametrize(("cached", "doubtful"), [(0, True), (499, True), (500, False)])
def test_half_of_it_leaves_no_doubt(cached: int, doubtful: bool) -> None:  # noqa: FBT001
    assert is_doubtful(1000, cached) is doubtful


def test_what_was_asked_for_again_and_computed_anew_was_not_used() -> None:
    assert is_disproved(1000, 20, 256)


def test_what_was_put_otherwise_than_before_proves_nothing() -> None:
    """A template that tells the date has other tokens on the next day."""
    assert not is_disproved(30, 30, 256)
    assert not is_disproved(300, 200, 256)
    assert not is_disproved(255, 0, 256)
