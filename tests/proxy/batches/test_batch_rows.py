"""Which statuses follow which: a batch is cancelled or completed, never both."""

from typing import Final

import pytest
from support.jobs_harness import JobsHarness, request

from proxy.batches import rows
from proxy.batches.records import ACTIVE, Status
from proxy.errors import Conflict

_ENDED: Final[tuple[Status, ...]] = ("failed", "completed", "expired", "cancelled")


async def after(jobs: JobsHarness, status: Status, change: str) -> Status:
    """The status after a change of a batch that has a status."""
    batch = await jobs.batch(request("a"))
    await jobs.database.write(
        lambda connection: connection.execute("UPDATE batches SET status = ?", (status,)).rowcount
    )
    match change:
        case "begin":
            found = await jobs.database.write(
                lambda connection: rows.begin_batch(connection, batch.id, 1, 1)
            )
        case "fail":
            found = await jobs.database.write(
                lambda connection: rows.fail_batch(connection, batch.id, "{}", 1)
            )
        case "finalize":
            found = await jobs.database.write(
                lambda connection: rows.finalize_batch(connection, batch.id, 1)
            )
        case _:
            found = await jobs.database.write(
                lambda connection: rows.cancel_batch(connection, batch.id, 1)
            )
    return found.status


@pytest.mark.parametrize("status", [*ACTIVE, *_ENDED])
@pytest.mark.parametrize(
    ("change", "before", "then"),
    [
        ("begin", "validating", "in_progress"),
        ("fail", "validating", "failed"),
        ("finalize", "in_progress", "finalizing"),
    ],
)
async def test_a_change_follows_one_status(
    jobs: JobsHarness, status: Status, change: str, before: Status, then: Status
) -> None:
    assert await after(jobs, status, change) == (then if status == before else status)


@pytest.mark.parametrize("status", ["validating", "in_progress", "cancelling"])
async def test_a_batch_that_computes_is_cancelled(jobs: JobsHarness, status: Status) -> None:
    assert await after(jobs, status, "cancel") == "cancelling"


@pytest.mark.parametrize("status", ["finalizing", *_ENDED])
async def test_a_batch_that_has_its_results_is_not_cancelled(
    jobs: JobsHarness, status: Status
) -> None:
    with pytest.raises(Conflict, match=status):
        await after(jobs, status, "cancel")
