"""Requests in flight are shown in every phase, and end there by a cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from proxy.observe.past import HistoryQuery

URL = "/corral/v1/requests"
KEYS = ("corral-one-12345", "corral-two-12345", "corral-admin-123")
PROGRESS = (
    b'data: {"choices":[{"index":0,"delta":{}}],"prompt_progress":'
    b'{"total":40,"cache":10,"processed":20,"time_ms":1}}\n\n'
)
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


async def computes(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(PROGRESS)
    await call.until_left()


async def generates(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(TOKEN)
    await call.chunk(TOKEN)
    await call.until_left()


async def requests(proxy: ProxyHarness, **headers: str) -> list[dict[str, Any]]:
    async with proxy.http.get(URL, headers=headers) as response:
        found: list[dict[str, Any]] = (await response.json())["requests"]
        return found


async def cancelled(proxy: ProxyHarness, request_id: str) -> int:
    async with proxy.http.post(f"{URL}/{request_id}/cancel") as response:
        return response.status


async def shows(
    proxy: ProxyHarness, is_so: Callable[[dict[str, Any]], bool], request_id: str = "a"
) -> dict[str, Any]:
    """Wait until a request is shown so; return it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for request in await requests(proxy):
                if request["id"] == request_id and is_so(request):
                    return request


async def asked(proxy: ProxyHarness, request_id: str = "a", **members: Any) -> tuple[int, bytes]:
    question = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **members}
    async with proxy.http.post(
        "/v1/chat/completions", json=question, headers={"X-Request-Id": request_id}
    ) as response:
        body = b""
        with suppress(aiohttp.ClientPayloadError):  # a stream that breaks has no end mark
            async for chunk in response.content.iter_any():
                body += chunk
        return response.status, body


async def test_the_latest_pass_has_the_tokens_that_the_engine_reported(proxy: ProxyHarness) -> None:
    """seed 001: MicroBatch n_prompt_tokens of a pass, from the engine's own progress."""

    async def compute_twice(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(PROGRESS)
        await call.chunk(PROGRESS.replace(b'"processed":20', b'"processed":36'))
        await call.until_left()

    await proxy.fake(compute_twice)
    waiting = asyncio.get_running_loop().create_task(asked(proxy))
    await shows(proxy, lambda response: bool(response["prompt_tokens_done"] == 36))
    async with proxy.http.get("/corral/v1/slots") as response:
        (found,) = (await response.json())["instances"]
    assert found["latest_pass"] == {"n_prompt_tokens": 16, "n_decode_tokens": 0}
    waiting.cancel()


async def test_a_prefill_shows_its_progress_and_ends(proxy: ProxyHarness) -> None:
    await proxy.fake(computes)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asked(proxy))
        found = await shows(proxy, lambda response: response["prompt_tokens_done"] == 20)
        assert (found["phase"], found["prompt_tokens"], found["cached_tokens"]) == (
            *("prefill", 40),
            10,
        )
        assert (found["model"], found["instance"], found["client"]) == (
            *("chat", "chat.1"),
            "127.0.0.1",
        )
        assert await cancelled(proxy, "a") == 200
    status, body = task.result()
    assert status == 499
    assert b"request_cancelled" in body
    assert await requests(proxy) == []
    assert await cancelled(proxy, "a") == 404


async def test_a_stream_ends_in_an_error_event(proxy: ProxyHarness) -> None:
    await proxy.fake(generates)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asked(proxy, stream=True))
        found = await shows(proxy, lambda response: response["phase"] == "decode")
        assert found["decoded_tokens"] > 0
        assert await cancelled(proxy, "a") == 200
    status, content = task.result()
    assert status == 200
    assert b'"code":"request_cancelled"' in content
    assert b"[DONE]" not in content
    (finished,) = proxy.events("request.finished")
    assert finished["status"] == 499


async def test_a_queued_request_has_a_place(proxy: ProxyHarness) -> None:
    await proxy.fake(generates)  # two slots
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(asked(proxy, name)) for name in "abcd"]
        for name in "abcd":
            await shows(proxy, lambda response: response["phase"] in {"decode", "queued"}, name)
        queued = [request for request in await requests(proxy) if request["phase"] == "queued"]
        assert sorted(request["position"] for request in queued) == [1, 2]
        for name in (*(request["id"] for request in queued), "a", "b", "c", "d"):
            await cancelled(proxy, name)
    assert {task.result()[0] for task in tasks} == {499}


async def test_a_request_that_waits_for_its_model_is_loading(proxy: ProxyHarness) -> None:
    proxy.loader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asked(proxy))
        await shows(proxy, lambda response: response["phase"] in {"queued", "loading"})
        assert await cancelled(proxy, "a") == 200
    assert task.result()[0] == 499


async def with_keys(proxy: ProxyHarness, directory: Path) -> None:
    path = directory / "keys.toml"
    path.touch(0o600)
    path.write_text(
        '[keys.one]\nkey = "corral-one-12345"\n[keys.two]\nkey = "corral-two-12345"\n'
        '[keys.root]\nkey = "corral-admin-123"\nadmin = true\n',
        "utf-8",
    )
    await proxy.server.close()
    await proxy.open(api_keys_file=path)


async def test_a_client_sees_its_own_requests_alone_and_an_admin_all(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    await with_keys(proxy, tmp_path)
    await proxy.fake(generates)
    one, two, admin = ({"Authorization": f"Bearer {key}"} for key in KEYS)

    async def ask() -> int:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        headers = {**one, "X-Request-Id": "a"}
        async with proxy.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status

    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask())
        await until(lambda: bool(proxy.router.instances()[0].leases))
        assert [found["client"] for found in await requests(proxy, **one)] == ["one"]
        assert await requests(proxy, **two) == []
        assert [found["client"] for found in await requests(proxy, **admin)] == ["one"]
        for headers, status in ((two, 404), (admin, 200)):
            async with proxy.http.post(f"{URL}/a/cancel", headers=headers) as response:
                assert response.status == status
        for headers, status in ((one, 404), (two, 404), (admin, 200)):
            proxy.history.stored = [{"id": "old", "client": "other"}]
            for page in ("old", "old/explanation"):
                url = f"{URL}/{page}?client=other"
                async with proxy.http.get(url, headers=headers) as response:
                    assert response.status == status
            proxy.conversations.known = {"old"}
            async with proxy.http.delete(f"{URL}/old/conversation", headers=headers) as response:
                assert response.status == status
    assert task.result() == 499


async def test_what_ended_is_listed_and_found_by_its_id(proxy: ProxyHarness) -> None:
    proxy.history.stored = [{"id": "b", "client": "x"}, {"id": "a", "client": "127.0.0.1"}]
    query = "state=finished&limit=5&model=chat&client=x&failed=true&since=12.5"
    async with proxy.http.get(f"{URL}?{query}") as response:
        assert (await response.json())["requests"] == [{"id": "b", "client": "x"}]
    assert proxy.history.asked == [HistoryQuery(5, None, "chat", "x", is_failed=True, since=12.5)]
    async with proxy.http.get(f"{URL}/a") as response:
        assert await response.json() == {"state": "finished", "id": "a", "client": "127.0.0.1"}
    async with proxy.http.get(f"{URL}/c") as response:
        assert response.status == 404


async def test_rates_of_the_past_have_a_span(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/corral/v1/rates?span=6h") as response:
        rates = await response.json()
    assert (rates["interval_s"], len(rates["queued"])) == (120, 180)
    async with proxy.http.get("/corral/v1/rates?span=1y") as response:
        assert response.status == 400


async def test_caches_over_time_are_for_admins(proxy: ProxyHarness, tmp_path: Path) -> None:
    path = "/corral/v1/caches/rates"
    async with proxy.http.get(f"{path}?span=15m") as response:
        assert response.status == 401
    await with_keys(proxy, tmp_path)
    one, _, admin = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    async with proxy.http.get(f"{path}?span=15m", headers=one) as response:
        assert response.status == 403
    async with proxy.http.get(f"{path}?span=1y", headers=admin) as response:
        assert response.status == 400
    async with proxy.http.get(f"{path}?span=15m", headers=admin) as response:
        found = await response.json()
    assert (found["interval_s"], found["models"]["chat"]["slot"]) == (5, [1.0] * 180)
    assert found["saved_today_s"] == {"chat": 2.5}


async def test_what_ended_is_explained(proxy: ProxyHarness) -> None:
    cache = {"cause": "slot_evicted", "tokens": 600, "found": 1, "reusable": 500}
    figures = {"model": "chat", "duration_ms": 900.0, "prefill_ms": 600.0, "cache": cache}
    proxy.history.stored = [{"id": "a", "client": "127.0.0.1", **figures}]
    async with proxy.http.get(f"{URL}/a/explanation") as response:
        told = await response.json()
    assert (told["request"], told["cause"]) == ("a", "slot_evicted")
    assert told["findings"][0]["cost_ms"] == pytest.approx(500, abs=1)
    async with proxy.http.get(f"{URL}/b/explanation") as response:
        assert response.status == 404


async def test_the_caches_of_a_conversation_are_deleted(proxy: ProxyHarness) -> None:
    proxy.history.stored = [{"id": "a", "client": "127.0.0.1"}]
    proxy.conversations.known = {"a"}
    async with proxy.http.delete(f"{URL}/a/conversation") as response:
        deleted = {"id": "a", "forgotten": True, "files": 2, "slots": 1, "in_use": False}
        assert await response.json() == deleted
    for gone in ("a", "b"):
        async with proxy.http.delete(f"{URL}/{gone}/conversation") as response:
            assert response.status == 404
    async with proxy.http.get(f"{URL}/a/conversation") as response:
        assert response.status == 405


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "failed=maybe", "since=yesterday", "limit=10001"]
)
async def test_a_wrong_question_about_the_past_is_400(proxy: ProxyHarness, query: str) -> None:
    async with proxy.http.get(f"{URL}?state=finished&{query}") as response:
        assert response.status == 400
    async with proxy.http.get(f"{URL}?state=old") as response:
        assert response.status == 400


async def test_one_in_flight_is_found_by_its_id(proxy: ProxyHarness) -> None:
    await proxy.fake(generates)
    async with asyncio.TaskGroup() as group:
        group.create_task(asked(proxy))
        await shows(proxy, lambda response: response["phase"] == "decode")
        async with proxy.http.get(f"{URL}/a") as response:
            assert (await response.json())["state"] == "in_flight"
        await cancelled(proxy, "a")
