"""Batch requests that gather, and their figures."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from support.requests import ask
from support.virtual_time import run_in_virtual_time

from proxy.errors import QueueFull
from proxy.router.batch_queue import BatchQueue, BatchQueueStats, metrics_of
from proxy.settings import BatchConfig
from proxy.upstream.endpoint_kinds import EndpointKind


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def queue(**changes: int) -> BatchQueue:
    return BatchQueue(BatchConfig(**changes), loop_time)


async def gathered_at(found: BatchQueue, count: int, model: str = "chat") -> list[float]:
    """Let so many requests gather; return when each began, in ms."""
    times: list[float] = []

    async def one() -> None:
        await found.gather(model, "anna")
        times.append(round(loop_time() * 1000, 3))

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
    return times


def virtually(main: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(main)


def test_a_few_wait_for_the_window_and_run_singly() -> None:
    async def main() -> None:
        found = queue()
        assert await gathered_at(found, 3) == [50, 50, 50]
        assert found.stats()["chat"] == BatchQueueStats(3, 0, 3, 0.0, 50.0)

    virtually(main())


def test_enough_for_a_batch_begin_at_once() -> None:
    async def main() -> None:
        found = queue()
        assert await gathered_at(found, 32) == [0] * 32
        assert found.stats()["chat"] == BatchQueueStats(32, 1, 0, 32.0, 0.0)

    virtually(main())


def test_the_figures_of_several_batches() -> None:
    """seed 003: BatchQueueStats.total_queued, .total_batches, .total_single, .avg_batch_size,
    .avg_wait_ms.
    """

    async def main() -> None:
        found = queue()
        with found.join("chat", "anna", 70) as turns:  # 64 at once, 6 after the window
            for turn in turns:
                await turn.formed.wait()
                found.begin("chat", turn)
        await found.gather("chat", "anna")
        expected = BatchQueueStats(71, 2, 1, 35.0, round((6 * 50 + 50) / 71, 3))
        assert found.stats() == {"chat": expected}
        assert found.waiting() == {"chat": 0}

    virtually(main())


def test_each_model_gathers_by_itself() -> None:
    async def main() -> None:
        found = queue(min_batch=2)
        async with asyncio.TaskGroup() as group:
            group.create_task(gathered_at(found, 1, "a"))
            group.create_task(gathered_at(found, 1, "b"))
        assert {name: stat.total_single for name, stat in found.stats().items()} == {"a": 1, "b": 1}

    virtually(main())


def test_no_more_wait_than_may() -> None:
    """seed 003: BatchConfig.queue_size."""

    async def main() -> None:
        found = queue(queue_size=3)
        with found.join("chat", "anna", 3):
            with pytest.raises(
                QueueFull, match=r"3 batch requests of this client wait already, and 3 may"
            ) as full:
                await found.gather("chat", "anna")
            assert full.value.headers() == {"Retry-After": "1"}
            await found.gather("chat", "ben")  # whose queue is empty
        assert found.waiting() == {"chat": 0}
        await found.gather("chat", "anna")

    virtually(main())


def test_one_that_leaves_is_not_part_of_a_batch() -> None:
    async def main() -> None:
        found = queue(min_batch=2)
        leaving = asyncio.get_running_loop().create_task(found.gather("chat", "anna"))
        await asyncio.sleep(0.01)
        leaving.cancel()
        assert await gathered_at(found, 1) == [60]
        assert found.stats()["chat"].total_single == 1
        assert found.waiting() == {"chat": 0}

    virtually(main())


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ask("a", priority="batch"), True),
        (ask("a"), False),
        (ask("a", priority="batch", kind=EndpointKind.INFO), False),
    ],
)
def test_which_requests_gather(request_: Any, *, expected: bool) -> None:
    assert request_.gathers is expected


def test_the_figures_for_prometheus() -> None:
    """seed 003: BatchQueueStats in /metrics."""
    families = metrics_of({"chat": BatchQueueStats(71, 2, 1, 35.0, 250.0)})
    samples = [sample for family in families for sample in family.samples]
    assert {sample.name: sample.value for sample in samples} == {
        "corral_batch_requests_queued_total": 71,
        "corral_batches_formed_total": 2,
        "corral_batch_requests_single_total": 1,
        "corral_batch_size_mean": 35.0,
        "corral_batch_wait_mean_seconds": 0.25,
    }
    assert {tuple(sample.labels.items()) for sample in samples} == {(("model", "chat"),)}
