"""The times of a finished request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from proxy.router.model_queue import with_times
from proxy.upstream.upstream import Timings


def test_the_times_of_a_response_that_reports_tokens_alone_are_those_of_our_clock() -> None:
    progress = SimpleNamespace(first_token_at_s=9.5, decoded=20)
    lease = cast("Any", SimpleNamespace(progress=progress, began_at_s=9.0))
    tokens_alone = Timings(1, 22, 0.0, 20, 0.0)
    assert with_times(tokens_alone, lease, 10.5) == Timings(1, 22, 500.0, 20, 1000.0)
    reported = Timings(1, 22, 125.0, 20, 500.0)
    assert with_times(reported, lease, 10.5) == reported
    progress.decoded = 2  # the events came together
    assert with_times(tokens_alone, lease, 10.5) == tokens_alone
