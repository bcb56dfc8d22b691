"""Which statuses follow which: a batch is cancelled or completed, never both."""

from typing import Final

import pytest
from support.jobs_harness import JobsHarness, request

from proxy.batches import rows
from proxy.batches.records import ACTIVE, Status
from proxy.errors import Conflict

_ENDED: Final[tuple[Status, ...]] = ("failed", "completed", "expired", "cancelled")


async def after(jobs: JobsHarness, status: Status, then: Status) -> Status:
    """The status of a batch that has a status and is to have another."""
    batch = await jobs.batch(request("a"))
    await jobs.database.run(
        lambda connection: connection.execute("UPDATE batches SET status = ?", (status,)).rowcount
    )
    found = (
        await jobs.database.run(rows.cancel_batch, "", batch.id, 1)
        if then == "cancelling"
        else await jobs.database.run(rows.set_status, batch.id, then, 1)
    )
    return found.status


@pytest.mark.parametrize("status", [*ACTIVE, *_ENDED])
@pytest.mark.parametrize(
    ("before", "then"),
    [
        ({"validating"}, "in_progress"),
        ({"validating"}, "failed"),
        ({"in_progress"}, "finalizing"),
        ({"finalizing"}, "completed"),
        ({"validating", "finalizing"}, "expired"),
        ({"cancelling"}, "cancelled"),
    ],
)
async def test_a_status_follows_certain_statuses(
    jobs: JobsHarness, status: Status, before: set[Status], then: Status
) -> None:
    assert await after(jobs, status, then) == (then if status in before else status)


@pytest.mark.parametrize("status", ["validating", "in_progress", "cancelling"])
async def test_a_batch_that_computes_is_cancelled(jobs: JobsHarness, status: Status) -> None:
    assert await after(jobs, status, "cancelling") == "cancelling"


@pytest.mark.parametrize("status", ["finalizing", *_ENDED])
async def test_a_batch_that_has_its_results_is_not_cancelled(
    jobs: JobsHarness, status: Status
) -> None:
    with pytest.raises(Conflict, match=status):
        await after(jobs, status, "cancelling")
