"""Batches that go on when a daemon starts, and files that are removed."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
from support.jobs_harness import OK, JobsHarness, request

from proxy.batches import rows as rows_module
from proxy.batches.own_requests import OwnAnswer
from proxy.batches.records import Batch
from proxy.batches.runner import Runner
from proxy.errors import NotFound
from proxy.settings import ProxySettings


@asynccontextmanager
async def serving(jobs: JobsHarness) -> AsyncIterator[Runner]:
    runner = Runner(jobs.places, jobs.tools, ProxySettings())
    task = asyncio.get_running_loop().create_task(runner.serve())
    yield runner
    task.cancel()
    await asyncio.wait([task])


async def ended(jobs: JobsHarness, batch: Batch) -> Batch:
    while batch.is_active:
        batch = await jobs.state(batch)
    return batch


async def rows(jobs: JobsHarness, table: str) -> int:
    count = f"SELECT COUNT(*) FROM {table}"  # noqa: S608 (a name of ours)
    return int(await jobs.database.run(lambda connection: connection.execute(count).fetchone()[0]))


async def test_batches_go_on_when_a_daemon_starts(jobs: JobsHarness) -> None:
    batch = await jobs.batch(request("a"))
    async with serving(jobs):
        assert (await ended(jobs, batch)).status == "completed"


async def test_nothing_is_created_before_it_is_used(jobs: JobsHarness) -> None:
    async with serving(jobs) as runner:
        runner.wake()
        await asyncio.sleep(0)
        assert not jobs.path.exists()
        runner.uploading.add("file-")
        batch = await jobs.batch(request("a"))
        runner.wake()
        assert (await ended(jobs, batch)).status == "completed"


async def test_batches_share_the_places_of_a_model(jobs: JobsHarness) -> None:
    jobs.configure(max_in_flight=1)
    order: list[Any] = []

    async def say(members: Mapping[str, Any]) -> OwnAnswer:
        order.append(members["of"])
        for _ in range(3):  # both batches have a line that waits
            await jobs.database.run(rows_module.used_bytes)
        return OK

    jobs.requests.say = say
    first = await jobs.batch(*[request(f"r{i}", of=1) for i in range(6)])
    await jobs.database.run(lambda connection: connection.execute("UPDATE files SET id = 'other'"))
    second = await jobs.batch(*[request(f"r{i}", of=2) for i in range(6)])
    async with serving(jobs):
        await ended(jobs, first)
        await ended(jobs, second)
    assert order.index(2) < 4
    assert jobs.requests.most == 1


async def test_what_an_upload_left_behind_is_removed_at_the_next_start(jobs: JobsHarness) -> None:
    new = ("file-x", "", "x", jobs.now)
    key = await jobs.database.run(rows_module.begin_file, new)
    await jobs.database.run(rows_module.add_lines, key, 1, [b"{}\n"] * 1200)
    async with serving(jobs):
        while await rows(jobs, "files"):
            pass
        assert await rows(jobs, "lines") == 0


async def test_an_upload_that_goes_on_is_not_removed(jobs: JobsHarness) -> None:
    new = ("file-x", "", "x", jobs.now)
    await jobs.database.run(rows_module.begin_file, new)
    assert not await jobs.database.run(rows_module.sweep_files, {"file-x"})
    assert await jobs.database.run(rows_module.sweep_files, {"file-y"})


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_file_expires_unless_a_batch_reads_it(jobs: JobsHarness, *, is_read: bool) -> None:
    if is_read:
        await jobs.batch(request("a"))
    else:
        await jobs.file([request("a")])
    later = jobs.now + 10**6
    await jobs.database.run(rows_module.expire_files, later)
    with nullcontext() if is_read else pytest.raises(NotFound):
        await jobs.database.run(rows_module.find_file, "", "file-")


async def test_a_batch_without_files_is_forgotten_after_a_month(jobs: JobsHarness) -> None:
    await jobs.run(await jobs.batch(request("a")))
    for later, left in ((jobs.now + 29 * 86_400, 1), (jobs.now + 31 * 86_400, 0)):
        await jobs.database.run(rows_module.expire_files, later)
        assert await rows(jobs, "batches") == left
