"""A completion is controlled whichever instance generates it."""

from __future__ import annotations

import asyncio

from support.proxy_harness import ProxyHarness, model_info
from support.upstream import Call

from proxy.apis.llama_server import COMPLETION_CONTROL, first_successful
from proxy.upstream.client import FetchedBody

BODY = {"model": "chat", "id": "chatcmpl-1", "action": "reasoning_end"}


async def say(call: Call, body: bytes, status: str = "200 OK") -> None:
    await call.head("Content-Type: application/json", f"Content-Length: {len(body)}", status=status)
    await call.send(body)


async def know(call: Call) -> None:
    await say(call, b'{"success":true}')


async def not_know(call: Call) -> None:
    await say(call, b'{"success":false}')


async def reject(call: Call) -> None:
    await say(call, b'{"error":{"code":400,"message":"unknown"}}', "400 Bad Request")


async def drop(call: Call) -> None:
    call.drop()


async def test_every_instance_of_the_model_is_asked(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat"), model_info("other")]
    first, second = await proxy.fake(not_know), await proxy.fake(know, "chat.2")
    async with proxy.http.post(COMPLETION_CONTROL, json=BODY) as response:
        assert (response.status, await response.json()) == (200, {"success": True})
    for fake in (first, second):
        call = await fake.calls.get()
        assert call.line == f"POST {COMPLETION_CONTROL} HTTP/1.1"
        assert b'"chatcmpl-1"' in call.body


async def test_a_draining_instance_is_asked(proxy: ProxyHarness) -> None:
    async def hold(call: Call) -> None:
        await (know(call) if COMPLETION_CONTROL in call.line else call.until_left())

    fake = await proxy.fake(hold)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(proxy.send())
        await fake.calls.get()
        proxy.router.withdraw(fake.name)
        async with proxy.http.post(COMPLETION_CONTROL, json=BODY) as response:
            assert await response.json() == {"success": True}
        asking.cancel()


async def test_what_an_engine_rejects_is_rejected(proxy: ProxyHarness) -> None:
    await proxy.fake(reject)
    async with proxy.http.post(COMPLETION_CONTROL, json=BODY) as response:
        assert (response.status, (await response.json())["error"]["message"]) == (400, "unknown")


async def test_one_broken_instance_hides_no_answer(proxy: ProxyHarness) -> None:
    await proxy.fake(drop)
    async with proxy.http.post(COMPLETION_CONTROL, json=BODY) as response:
        assert response.status == 502
    await proxy.fake(not_know, "chat.2")
    async with proxy.http.post(COMPLETION_CONTROL, json=BODY) as response:
        assert (response.status, await response.json()) == (200, {"success": False})


async def test_it_loads_no_model(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat", "unloaded")]
    async with proxy.http.post(COMPLETION_CONTROL, json=BODY) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "not_loaded")
    assert not proxy.loader.began.is_set()


def test_success_goes_first() -> None:
    answers = [
        FetchedBody(400, b"x"),
        FetchedBody(200, b"[]"),
        FetchedBody(200, b'{"success":true}'),
    ]
    assert first_successful(answers) is answers[2]
    assert first_successful(answers[:2]) is answers[0]
