"""`POST /v1/batch/completions`, answered by the real engine."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import engine as engines
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from supervisor.builds.discover import Engine

PATH = "/v1/batch/completions"
PROMPTS = ["the cat", "in the", "a", "on the the cat", "the"]


@pytest.fixture(scope="module")
def socket(engine: Engine, slow_model: Path) -> Iterator[Path]:
    options = ["-c", "4096", "-np", "2", "-t", "1", "--no-kv-unified"]
    with engines.running(engine, slow_model, *options) as socket:
        yield socket


async def post(proxy: ProxyHarness, **members: Any) -> tuple[int, dict[str, Any]]:
    async with proxy.http.post(PATH, json=members) as response:
        return response.status, await response.json()


async def test_results_are_those_of_single_requests_in_order(
    proxy: ProxyHarness, socket: Path
) -> None:
    """seed 003: GpuBatchResult.index, .token_ids, .text, .num_generated; GpuBatchResponse.

    ContinuousBatchResponse batched, batch_size, latency_ms.
    """
    proxy.router.admit(engines.upstream(socket, 2))
    status, found = await post(proxy, prompts=PROMPTS, max_tokens=6, model="vendor/chat")
    assert (status, list(found)) == (200, ["results", "stats"])
    for index, result in enumerate(found["results"]):
        single = {"prompt": PROMPTS[index], "n_predict": 6, "temperature": 0, "top_k": 50}
        async with proxy.http.post(
            "/completion", json={**single, "return_tokens": True}
        ) as response:
            alone = await response.json()
        assert result.pop("latency_ms") > 0
        assert result == {
            "index": index,
            "token_ids": alone["tokens"],
            "text": alone["content"],
            "num_generated": 6,
            "batched": True,
            "batch_size": 5,
        }


async def test_prompts_too_few_for_a_batch_run_singly(proxy: ProxyHarness, socket: Path) -> None:
    """seed 003: ContinuousBatchResponse.single: batched, batch_size."""
    proxy.router.admit(engines.upstream(socket, 2))
    _, found = await post(proxy, prompts=PROMPTS[:2], max_tokens=1)
    assert [(result["batched"], result["batch_size"]) for result in found["results"]] == [
        (False, 1)
    ] * 2


@pytest.mark.parametrize(("gpu_layers", "gpu_used"), [(0, False), (13, True)])
async def test_the_figures_of_a_batch(
    proxy: ProxyHarness, socket: Path, gpu_layers: int, *, gpu_used: bool
) -> None:
    """seed 003: GpuBatchStats.batch_size, .gpu_used, .total_tokens, .processing_time_ms,
    .throughput_tps.
    """
    proxy.router.admit(replace(engines.upstream(socket, 2), gpu_layers=gpu_layers))
    _, found = await post(proxy, prompts=PROMPTS, max_tokens=3)
    stats = found["stats"]
    seconds = stats.pop("processing_time_ms") / 1000
    assert stats.pop("throughput_tps") == pytest.approx(15 / seconds, rel=0.01)
    assert stats == {"batch_size": 5, "gpu_used": gpu_used, "total_tokens": 15}
    events = proxy.events("request.finished")
    assert [event["status"] for event in events] == [200] * 5
    assert len({event["request"] for event in events}) == 5


async def test_as_lines_each_result_comes_when_it_is_complete(
    proxy: ProxyHarness, socket: Path
) -> None:
    proxy.router.admit(engines.upstream(socket, 2))
    body = {"prompts": PROMPTS, "max_tokens": 3}
    async with proxy.http.post(
        PATH, json=body, headers={"Accept": "application/x-ndjson"}
    ) as response:
        assert response.headers["Content-Type"] == "application/x-ndjson"
        *results, last = [json.loads(line) async for line in response.content]
    assert sorted(result["index"] for result in results) == list(range(5))
    assert {result["num_generated"] for result in results} == {3}
    assert last["stats"]["total_tokens"] == 15


async def test_a_line_is_sent_while_others_are_computed(proxy: ProxyHarness) -> None:
    may_end = asyncio.Event()

    async def script(call: Call) -> None:
        if b'"last"' in call.body:
            await may_end.wait()
        body = b'{"content": "x", "tokens": [1], "stop": true}'
        await call.head("Content-Type: application/json", f"Content-Length: {len(body)}")
        await call.send(body)

    await proxy.fake(script)
    async with proxy.http.post(
        PATH, json={"prompts": ["first", "last"]}, headers={"Accept": "application/x-ndjson"}
    ) as response:
        assert json.loads(await response.content.readline())["index"] == 0
        may_end.set()
        assert json.loads(await response.content.readline())["index"] == 1
        assert "stats" in json.loads(await response.content.read())


async def test_a_prompt_that_fails_says_so_in_its_place(proxy: ProxyHarness, socket: Path) -> None:
    proxy.router.admit(engines.upstream(socket, 2))
    status, found = await post(proxy, prompts=["a", "the " * 9000, "b"], max_tokens=3)
    assert status == 200
    assert [result["num_generated"] for result in found["results"]] == [3, 0, 3]
    assert [result.get("error") is None for result in found["results"]] == [True, False, True]
    assert "exceed" in found["results"][1]["error"]["message"]
    assert found["stats"]["total_tokens"] == 6


async def test_where_each_prompt_fails_the_error_is_the_answer(proxy: ProxyHarness) -> None:
    status, found = await post(proxy, prompts=["a", "b"])
    assert (status, found["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize(
    ("members", "status", "message"),
    [
        ({"prompts": ["a", ""]}, 400, "Prompt cannot be empty"),
        ({"prompts": []}, 400, "Prompts array cannot be empty"),
        ({"prompts": ["a"], "max_tokens": 0}, 400, "max_tokens must be a whole number, 1 or more"),
        ({"prompts": ["a"], "model": "other"}, 404, "there is no model"),
        ({"prompts": ["a"], "stop": ["x"] * 300}, 400, "stop has 300 entries"),
        ({"prompts": ["a"] * 1025}, 400, "prompts has 1025 entries, more than 1024"),
    ],
)
async def test_a_mistake_is_the_answer(
    proxy: ProxyHarness, members: dict[str, Any], status: int, message: str
) -> None:
    """seed 003: gpu_batch_completions_handler, ApiErr."""
    found = await post(proxy, **members)
    assert found[0] == status
    assert message in found[1]["error"]["message"]


@pytest.mark.parametrize("path", [PATH, "/batch/generate"])
async def test_more_than_may_wait_are_refused(proxy: ProxyHarness, path: str) -> None:
    async def hold(call: Call) -> None:
        await call.until_left()

    await proxy.fake(hold)
    await proxy.open(batch=proxy.settings.batch.model_copy(update={"queue_size": 5}))
    waiting = asyncio.get_running_loop().create_task(post(proxy, prompts=["a"] * 5))
    await until(lambda: "chat" in proxy.router.queues.stats())
    await until(lambda: proxy.router.queues.stats()["chat"].batch == 1)
    assert proxy.router.count_in_flight("chat.1") == 2  # the others are in no queue yet
    async with proxy.http.post(path, json={"prompts": ["a"] * 5}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert (await response.json())["error"]["code"] == "queue_full"
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_client_that_leaves_cancels_all(proxy: ProxyHarness, socket: Path) -> None:
    proxy.router.admit(engines.upstream(socket, 2))
    members = {"prompts": PROMPTS * 10, "max_tokens": 2000, "ignore_eos": True}
    waiting = asyncio.get_running_loop().create_task(post(proxy, **members))
    await until(lambda: proxy.router.count_in_flight("chat.1") == 2)
    waiting.cancel()
    await until(lambda: not proxy.router.instances()[0].leases)  # the engine says so
    await until(lambda: len(proxy.events("request.finished")) == 3)  # one waited for a slot
    assert {event["status"] for event in proxy.events("request.finished")} == {499}
    async with proxy.http.get("/corral/v1/batch") as response:
        assert (await response.json())["models"]["chat"]["waiting"] == 0


async def test_a_drain_breaks_a_batch_off(proxy: ProxyHarness) -> None:
    async def hold(call: Call) -> None:
        await call.until_left()

    await proxy.fake(hold)
    waiting = asyncio.get_running_loop().create_task(post(proxy, prompts=["a", "b"]))
    await until(lambda: proxy.router.count_in_flight("chat.1") >= 1)
    await proxy.server.drain(0)
    status, found = await waiting
    assert (status, found["error"]["code"]) == (503, "draining")


async def test_the_batches_are_counted(proxy: ProxyHarness, socket: Path) -> None:
    """seed 003: BatchQueueStats in the status and in /metrics."""
    proxy.router.admit(engines.upstream(socket, 2))
    await post(proxy, prompts=PROMPTS, max_tokens=1)
    async with proxy.http.get("/corral/v1/batch") as response:
        found = await response.json()
    assert found["config"]["window_ms"] == 50
    chat = found["models"]["chat"]
    assert chat.pop("avg_wait_ms") >= 50
    assert chat == {
        "waiting": 0,
        "total_queued": 5,
        "total_batches": 1,
        "total_single": 0,
        "avg_batch_size": 5.0,
    }
    async with proxy.http.get("/metrics") as response:
        assert 'corral_batches_formed_total{model="chat"} 1.0' in await response.text()


async def test_other_batch_requests_gather_too_and_streams_stay_streams(
    proxy: ProxyHarness, socket: Path
) -> None:
    proxy.router.admit(engines.upstream(socket, 2))
    body = {"prompt": "a", "max_tokens": 3, "stream": True}

    async def ask(headers: dict[str, str]) -> bytes:
        async with proxy.http.post("/v1/completions", json=body, headers=headers) as response:
            return await response.read()

    batch = {"X-Corral-Priority": "batch"}
    async with asyncio.TaskGroup() as group:
        said = [group.create_task(ask(headers)) for headers in (batch, batch, batch, batch, {})]
    assert all(answer.result().endswith(b"data: [DONE]\n\n") for answer in said)
    async with proxy.http.get("/corral/v1/batch") as response:
        chat = (await response.json())["models"]["chat"]
    assert (chat["total_queued"], chat["total_batches"], chat["total_single"]) == (4, 1, 0)
