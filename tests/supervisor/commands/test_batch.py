"""The progress of `corral batch run`."""

from supervisor.commands.batch_progress import Pace


def test_the_rest_takes_as_long_as_what_was_done_since_the_first_look() -> None:
    pace = Pace(10, 100.0)
    assert pace.left_s(10, 50, 110.0) is None
    assert pace.left_s(30, 50, 110.0) == 10.0
    assert pace.left_s(50, 50, 120.0) == 0.0
