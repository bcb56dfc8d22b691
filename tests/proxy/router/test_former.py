"""When requests that gather become a batch."""

import pytest

from proxy.router.batch_queue import form
from proxy.settings import BatchConfig

CONFIG = BatchConfig()


@pytest.mark.parametrize(
    ("waiting", "waited_ms", "expected"),
    [
        (1, 0, 50),
        (31, 30.5, 19.5),
        (32, 0, (32, True)),
        (3, 50, (3, False)),
        (4, 50, (4, True)),
        (64, 0, (64, True)),
        (65, 0, (64, True)),
        (1000, 99, (64, True)),
    ],
)
def test_what_requests_that_gather_do(
    waiting: int, waited_ms: float, expected: tuple[int, bool] | float
) -> None:
    """seed 003: batch_processor_task, BatchConfig.window_ms, min_batch, optimal_batch, max_batch.

    A batch begins at its optimal size, or when the window is over; fewer than the least run singly.
    """
    assert form(CONFIG, waiting, waited_ms) == expected


def test_without_a_window_no_request_waits() -> None:
    assert form(BatchConfig(window_ms=0), 1, 0) == (1, False)
