"""One batch from its validation to its end, with all faults on the way."""

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.jobs_harness import OK, JobsHarness, failure, request

from proxy.batches import rows
from proxy.batches.own_requests import OwnAnswer
from proxy.batches.records import Batch, LineResult
from proxy.errors import StorageFull


async def test_each_line_has_one_result_in_the_order_of_the_file(jobs: JobsHarness) -> None:
    batch = await jobs.run(await jobs.batch(*[request(f"r{i}") for i in range(20)]))
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 20, 20, 0)
    found = await jobs.lines(batch.output_file_id)
    assert [line["custom_id"] for line in found] == [f"r{i}" for i in range(20)]
    assert batch.error_file_id is None
    assert batch.in_progress_at == batch.finalizing_at == batch.completed_at == jobs.now
    ended = {"batch": batch.id, "status": "completed", "total": 20, "completed": 20, "failed": 0}
    assert jobs.emitted == [("batch.ended", ended)]


async def test_a_result_has_openais_members(jobs: JobsHarness) -> None:
    batch = await jobs.run(await jobs.batch(request("a")))
    (line,) = await jobs.lines(batch.output_file_id)
    assert line.pop("id").startswith("batch_req_")
    assert line["response"].pop("request_id").startswith("req_")
    assert line == {
        "custom_id": "a",
        "response": {"status_code": 200, "body": {"id": "1"}},
        "error": None,
    }


async def test_a_line_that_fails_is_in_the_error_file(jobs: JobsHarness) -> None:
    async def say(members: Mapping[str, Any]) -> OwnAnswer:
        return failure(400) if members["n"] == 1 else OK

    jobs.requests.say = say
    batch = await jobs.run(await jobs.batch(request("a", n=0), request("b", n=1)))
    assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 1)
    assert [line["custom_id"] for line in await jobs.lines(batch.output_file_id)] == ["a"]
    (line,) = await jobs.lines(batch.error_file_id)
    assert line["custom_id"] == "b"
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["code"] == "code"


async def test_blank_lines_and_a_byte_order_mark_are_no_requests(jobs: JobsHarness) -> None:
    lines = [b"\xef\xbb\xbf" + request("a"), b"\n", b"  \n", request("b").rstrip()]
    batch = await jobs.run(await jobs.batch(*lines))
    assert (batch.status, batch.total, batch.completed) == ("completed", 2, 2)


async def test_an_invalid_line_fails_the_batch_before_anything_is_computed(
    jobs: JobsHarness,
) -> None:
    batch = await jobs.run(await jobs.batch(request("a"), b"{\n"))
    assert (batch.status, batch.failed_at, batch.output_file_id) == ("failed", jobs.now, None)
    assert '"line":2' in (batch.errors or "")
    assert jobs.requests.asked == []


@pytest.mark.parametrize("status", [429, 503])
async def test_a_model_is_waited_for_as_long_as_it_takes_and_the_reason_is_shown(
    jobs: JobsHarness, status: int
) -> None:
    refusals = [failure(status)] * 20
    reasons: list[str | None] = []

    async def say(_: Mapping[str, Any]) -> OwnAnswer:
        reasons.append(jobs.reporter.wait_reason(batch))
        return refusals.pop() if refusals else OK

    jobs.requests.say = say
    batch = await jobs.batch(request("a"))
    batch = await jobs.run(batch)
    assert batch.completed == 1
    assert reasons == [None, *["no"] * 20]
    assert jobs.reporter.wait_reason(batch) is None
    assert jobs.slept_s[:3] == [1, 2, 4]
    assert max(jobs.slept_s) == 60


async def test_a_failing_engine_is_tried_a_few_times(jobs: JobsHarness) -> None:
    async def say(_: Mapping[str, Any]) -> OwnAnswer:
        return failure(502, "upstream_crashed")

    jobs.requests.say = say
    batch = await jobs.run(await jobs.batch(request("a")))
    assert (batch.status, batch.completed, batch.failed) == ("completed", 0, 1)
    assert len(jobs.requests.asked) == jobs.settings.max_attempts == 5


async def test_lines_without_a_result_are_computed_after_a_restart_and_no_others(
    jobs: JobsHarness,
) -> None:
    batch = await jobs.batch(*[request(f"r{i}", n=i) for i in range(10)])

    async def hang_at_odd(members: Mapping[str, Any]) -> OwnAnswer:
        if members["n"] % 2:
            await asyncio.Event().wait()
        return OK

    jobs.requests.say = hang_at_odd
    task = asyncio.get_running_loop().create_task(jobs.job(batch).run())
    while (await jobs.state(batch)).completed < 5:
        pass
    task.cancel()
    await asyncio.wait([task])

    jobs.requests.asked.clear()
    jobs.requests.say = always_ok
    await jobs.reopen()
    batch = await jobs.run(await jobs.state(batch))
    assert (batch.status, batch.completed) == ("completed", 10)
    assert sorted(members["n"] for members in jobs.requests.asked) == [1, 3, 5, 7, 9]
    assert len(await jobs.lines(batch.output_file_id)) == 10


async def always_ok(_: Mapping[str, Any]) -> OwnAnswer:
    return OK


async def test_a_result_that_is_stored_twice_counts_once(jobs: JobsHarness) -> None:
    batch = await jobs.run(await jobs.batch(request("a")))
    again = [LineResult(1, "failed", b"{}\n")]
    await jobs.database.run(rows.store_result, batch.key, again)
    after = await jobs.state(batch)
    assert (after.completed, after.failed) == (1, 0)


async def begun(jobs: JobsHarness, batch: Batch) -> asyncio.Task[None]:
    """Run a batch until its first line is computed, which does not end."""

    async def say(members: Mapping[str, Any]) -> OwnAnswer:
        if members.get("n"):
            await asyncio.Event().wait()
        return OK

    jobs.requests.say = say
    job = jobs.job(batch)
    task = asyncio.get_running_loop().create_task(job.run())
    while not (await jobs.state(batch)).completed or not jobs.requests.working:
        pass
    await jobs.database.run(rows.cancel_batch, "", batch.id, jobs.now)
    job.cancel()
    return task


async def test_a_cancelled_batch_keeps_the_results_that_it_has(jobs: JobsHarness) -> None:
    batch = await jobs.batch(request("a"), request("b", n=1), request("c", n=1))
    await (await begun(jobs, batch))
    after = await jobs.state(batch)
    assert (after.status, after.total, after.completed, after.failed) == ("cancelled", 3, 1, 0)
    assert [line["custom_id"] for line in await jobs.lines(after.output_file_id)] == ["a"]
    assert jobs.requests.working == 0


async def test_a_batch_that_was_being_cancelled_ends_after_a_restart(jobs: JobsHarness) -> None:
    batch = await jobs.batch(request("a"))
    await jobs.database.run(rows.cancel_batch, "", batch.id, jobs.now)
    after = await jobs.run(await jobs.state(batch))
    assert (after.status, jobs.requests.asked) == ("cancelled", [])


async def test_lines_that_the_window_leaves_over_expire(jobs: JobsHarness) -> None:
    batch = await jobs.batch(request("a"), request("b"))
    result = [LineResult(1, "completed", b'{"custom_id":"a"}\n')]
    await jobs.database.run(rows.set_status, batch.id, "in_progress", jobs.now, total=2)
    await jobs.database.run(rows.store_result, batch.key, result)
    jobs.now += 86_400
    after = await jobs.run(await jobs.state(batch))
    assert (after.status, after.completed, after.failed) == ("expired", 1, 1)
    assert after.expired_at == jobs.now
    (line,) = await jobs.lines(after.error_file_id)
    assert (line["custom_id"], line["response"]) == ("b", None)
    assert line["error"]["code"] == "batch_expired"
    assert jobs.requests.asked == []


async def test_as_many_lines_are_computed_at_once_as_there_are_places(jobs: JobsHarness) -> None:
    jobs.configure(max_in_flight=3)
    may_end = asyncio.Event()

    async def say(_: Mapping[str, Any]) -> OwnAnswer:
        await may_end.wait()
        return OK

    jobs.requests.say = say
    batch = await jobs.batch(*[request(f"r{i}") for i in range(12)])
    async with asyncio.TaskGroup() as group:
        group.create_task(jobs.run(batch))
        while jobs.requests.working < 3:
            await jobs.state(batch)
        for _ in range(20):  # a further line would be begun meanwhile
            await jobs.state(batch)
        may_end.set()
    assert jobs.requests.most == 3


async def test_a_full_database_pauses_a_batch_and_loses_nothing(jobs: JobsHarness) -> None:
    await jobs.reopen(max_bytes=4 * 1024**2)  # a real SQLITE_FULL
    batch = await jobs.batch(*[request(f"r{i}") for i in range(8)])
    await fill(jobs)

    async def say(_: Mapping[str, Any]) -> OwnAnswer:
        return OwnAnswer(200, b'"' + b"x" * 10_000 + b'"')

    jobs.requests.say = say
    async with asyncio.TaskGroup() as group:
        ended = group.create_task(jobs.run(batch))
        await until_paused(jobs, batch)
        paused = await jobs.state(batch)
        assert (paused.status, paused.completed) == ("in_progress", 0)
        while await jobs.database.run_until_done(rows.sweep_files, ()):
            pass
    after = ended.result()
    assert (after.status, after.completed, jobs.database.failure) == ("completed", 8, None)
    assert len(await jobs.lines(after.output_file_id)) == 8
    assert len(jobs.requests.asked) == 8  # none was computed again
    names = [name for name, _ in jobs.emitted]
    assert names.index("batches.paused") < names.index("batches.resumed")
    assert "total_bytes" in jobs.emitted[0][1]["reason"]


async def fill(jobs: JobsHarness) -> None:
    """Fill the database by a file whose upload ended."""
    key = await jobs.database.run(rows.begin_file, ("file-x", "", "x", 1))
    first = 1
    for size_bytes in (100_000, 4_000, 10):
        with pytest.raises(StorageFull):
            first = await fill_with(jobs, key, first, b"x" * size_bytes)
        first += 10_000


async def fill_with(jobs: JobsHarness, key: int, first: int, line: bytes) -> int:
    for number in itertools.count(first):
        await jobs.database.run(rows.add_lines, key, number, [line])
    return first


async def until_paused(jobs: JobsHarness, batch: Batch) -> None:
    while jobs.database.failure is None or len(jobs.requests.asked) < 8:
        await jobs.state(batch)


KEYS = '[keys.me]\nkey = "corral-me-1234"\nmodels = ["{model}"]\n'


async def test_a_line_may_use_the_models_that_its_key_may_use_at_present(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEYS.format(model="chat"))
    jobs = JobsHarness(tmp_path, path)
    batch = await jobs.batch(request("a"), owner="me")
    after = await jobs.run(batch)
    assert (after.status, jobs.requests.clients) == ("completed", {"me"})
    assert [info.id for info in jobs.requests.names[0].model_infos] == ["chat"]

    path.write_text(KEYS.format(model="other"))
    assert jobs.tools.names_of("me") is not None
    assert jobs.tools.names_of("me").model_infos == ()  # type: ignore[union-attr]
    await jobs.close()


async def test_a_batch_without_its_key_is_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEYS.format(model="chat"))
    jobs = JobsHarness(tmp_path, path)
    of_nobody = await jobs.run(await jobs.batch(request("a")))
    assert (of_nobody.status, jobs.requests.asked) == ("cancelled", [])

    batch = await jobs.batch(request("a"), request("b", n=1), owner="me")

    async def remove_key(_: Mapping[str, Any]) -> OwnAnswer:
        path.write_text("")
        return failure(503, "queue_full")

    jobs.requests.say = remove_key
    after = await jobs.run(batch)
    assert (after.status, after.completed, after.failed) == ("cancelled", 0, 0)
    await jobs.close()


async def test_a_batch_whose_key_is_limited_waits_alone(jobs: JobsHarness) -> None:
    """A line of it holds no place while it waits, and as few wait as were begun together."""
    jobs.configure(max_in_flight=1)
    others_ended = asyncio.Event()

    async def say(members: Mapping[str, Any]) -> OwnAnswer:
        if members["n"] or others_ended.is_set():
            return OK
        return OwnAnswer(429, b'{"error": {"message": "spent"}}', 6919, is_limited=True)

    jobs.requests.say = say
    limited = await jobs.batch(*[request(f"a{i}", n=0) for i in range(50)], owner="anna")
    other = await jobs.batch(*[request(f"b{i}", n=1) for i in range(5)], owner="ben")
    async with asyncio.TaskGroup() as group, asyncio.timeout(PATIENCE_S):
        waits = group.create_task(jobs.run(limited))
        while not jobs.slept_s:
            await jobs.state(limited)
        assert (await jobs.run(other)).completed == 5
        assert (await jobs.state(limited)).completed == 0
        others_ended.set()
        assert (await waits).completed == 50
    assert set(jobs.slept_s) == {60}  # it looks again every minute, and not sooner
