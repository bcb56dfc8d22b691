"""Which answers are a line's result."""

import pytest
from support.jobs_harness import OK, failure

from proxy.batches.line_runner import Retry, retry_of
from proxy.batches.own_requests import OwnAnswer


@pytest.mark.parametrize(
    ("answer", "retry"),
    [
        (OK, None),
        (failure(400), None),
        (failure(404, "model_not_found"), None),
        (failure(422, "crashes_engine"), None),
        (failure(429, "queue_full"), (1, False)),
        (failure(503, "model_loading"), (1, False)),
        (failure(503, "unavailable"), (1, False)),
        (failure(502, "upstream_crashed"), (1, True)),
        (
            OwnAnswer(429, b"", 6919, is_limited=True),
            (60, False),
        ),
        (OwnAnswer(502, b"<html>"), (1, True)),
        (OwnAnswer(503, b'{"error": {"code": "queue_full"}}', 30), (30, False)),
    ],
)
def test_what_follows_a_first_answer(answer: OwnAnswer, retry: Retry | None) -> None:
    assert retry_of(answer, 0, 0, 5) == retry


def test_attempts_are_bounded_and_waits_are_not() -> None:
    assert retry_of(failure(502), 3, 0, 5) == (8, True)
    assert retry_of(failure(502), 4, 0, 5) is None
    assert retry_of(failure(503, "queue_timeout"), 4, 10_000, 5) == (60, False)
