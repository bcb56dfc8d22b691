"""Requests whose engine crashed get their error, and no second engine."""

import asyncio
from dataclasses import replace
from typing import get_args

import pytest
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call, Fake, Script

from proxy.router.lease import ProcessExit
from proxy.upstream.upstream import Upstream

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


async def watched(proxy: ProxyHarness, script: Script, name: str) -> Fake:
    """Start an instance whose exit is reported."""
    fake = await proxy.fake(script, name, is_admitted=False)
    proxy.router.admit(replace(fake.upstream(), reports_exit=True))
    return fake


def crashing(proxy: ProxyHarness, name: str, process_exit: ProcessExit = "crashed") -> Script:
    """Return the handler of an instance that dies as soon as it has a request."""

    async def speak(call: Call) -> None:
        call.drop()
        # The connection breaks first; that the process is gone is known later.
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, end, proxy, name, process_exit)

    return speak


def end(proxy: ProxyHarness, name: str, process_exit: ProcessExit) -> int:
    """Tell that a process is gone, as whoever runs it does."""
    computed = proxy.router.note_end(name, process_exit)
    proxy.router.withdraw(name)
    return computed


async def test_a_request_that_its_engine_crashed_with_is_not_tried_again(
    proxy: ProxyHarness,
) -> None:
    for name in ("chat.1", "chat.2"):
        await watched(proxy, crashing(proxy, name), name)
    async with proxy.ask() as response:
        assert response.status == 502
        assert response.headers["X-Should-Retry"] == "false"
        error = (await response.json())["error"]
    assert error["code"] == "upstream_crashed"
    assert "crashed while computing this request" in error["message"]
    (finished,) = proxy.events("request.finished")
    assert (finished["attempts"], finished["status"]) == (1, 502)
    assert "crashed" in proxy.events("upstream.failed")[0]["error"]


async def test_one_whose_engine_ended_otherwise_is_tried_again(proxy: ProxyHarness) -> None:
    await watched(proxy, crashing(proxy, "chat.1", "failed"), "chat.1")
    await proxy.fake(name="chat.2")
    async with proxy.ask() as response:
        assert response.status == 200


async def on_trial(proxy: ProxyHarness, script: Script) -> Fake:
    """Start an instance on trial, which gets all conversations, and `chat.2`, which is not."""
    fake = await proxy.fake(script, "chat.1", is_admitted=False)
    proxy.router.admit(replace(fake.upstream(), reports_exit=True, trial_share=1.0))
    await proxy.fake(say_stream, "chat.2")
    return fake


async def say_stream(call: Call) -> None:
    await call.begin_stream()
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    await call.chunk(EVENT + end + b"data: [DONE]\n\n")
    await call.end()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_request_that_crashed_an_instance_on_trial_is_tried_elsewhere(
    proxy: ProxyHarness,
    is_stream: bool,  # noqa: FBT001 (a parameter)
) -> None:
    await on_trial(proxy, crashing(proxy, "chat.1"))
    async with proxy.ask(stream=is_stream) as response:
        assert response.status == 200
        assert response.headers["X-Corral-Instance"] == "chat.2"
        await response.read()
    (finished,) = proxy.events("request.finished")
    assert (finished["attempts"], finished["status"]) == (2, 200)
    assert "on trial, crashed" in proxy.events("upstream.failed")[0]["error"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_one_that_failed_on_trial_is_tried_elsewhere(
    proxy: ProxyHarness,
    is_stream: bool,  # noqa: FBT001 (a parameter)
) -> None:
    async def speak(call: Call) -> None:
        body = b'{"error":{"code":500,"message":"no","type":"server_error"}}'
        fields = ("Content-Type: application/json", f"Content-Length: {len(body)}")
        await call.head(*fields, status="500 Internal Server Error")
        await call.send(body)

    fake = await on_trial(proxy, speak)
    async with proxy.ask(stream=is_stream) as response:
        assert (response.status, fake.calls.qsize()) == (200, 1)
        await response.read()
    assert "on trial and answered 500" in proxy.events("upstream.failed")[0]["error"]


async def test_one_that_was_never_sent_is_tried_again(proxy: ProxyHarness) -> None:
    gone = Upstream("chat.1", "chat", 2, "/nowhere/x.sock", "", 0, "inner", reports_exit=True)
    proxy.router.admit(gone)
    await proxy.fake(name="chat.2")
    async with proxy.ask() as response:
        assert response.status == 200


async def test_the_second_time_it_is_refused_and_others_are_served(proxy: ProxyHarness) -> None:
    for name in ("chat.1", "chat.2"):
        await watched(proxy, crashing(proxy, name), name)
    for _ in range(2):
        async with proxy.ask(seed=1) as response:
            assert response.status == 502
    await proxy.fake(name="chat.3")
    async with proxy.ask(seed=2) as response:
        assert response.status == 422
        assert (await response.json())["error"]["code"] == "crashes_engine"
    async with proxy.ask(temperature=0) as response:
        assert response.status == 200
    assert proxy.events("request.rejected")[0]["code"] == "crashes_engine"


async def test_one_that_waited_while_another_like_it_crashed_is_refused_too(
    proxy: ProxyHarness,
) -> None:
    await watched(proxy, crashing(proxy, "chat.0"), "chat.0")
    await proxy.send()
    may_crash = asyncio.Event()

    async def speak(call: Call) -> None:
        await may_crash.wait()
        await crashing(proxy, "chat.1")(call)

    fake = await proxy.fake(speak, "chat.1", is_admitted=False)
    proxy.router.admit(replace(fake.upstream(slots=2), reports_exit=True))
    async with asyncio.TaskGroup() as group:
        sent = [group.create_task(proxy.send()) for _ in range(2)]
        await until(lambda: proxy.router.count_in_flight("chat.1") == 2)
        last = group.create_task(status(proxy))
        await until(lambda: proxy.router.demand("chat").waiting == 1)
        may_crash.set()
        await asyncio.wait(sent)
        other = await proxy.fake(name="chat.2")
        assert await last == 422
    assert other.calls.empty()


async def status(proxy: ProxyHarness) -> int:
    async with proxy.ask() as response:
        return response.status


async def test_a_stream_under_way_ends_with_the_reason(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT)
        await crashing(proxy, "chat.1")(call)

    await watched(proxy, speak, "chat.1")
    async with proxy.ask(stream=True) as response:
        assert await response.content.readuntil(b"\n\n") == EVENT
        assert b"crashed while computing" in await response.content.readuntil(b"\n\n")


async def test_a_stream_whose_engine_lost_a_worker_ends_with_that_and_is_no_suspect(
    proxy: ProxyHarness,
) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT)
        call.drop()
        proxy.router.note_end("chat.1", "failed", reason="an RPC worker was lost")
        proxy.router.withdraw("chat.1")

    for _ in range(3):
        await watched(proxy, speak, "chat.1")
        async with proxy.ask(stream=True) as response:
            assert await response.content.readuntil(b"\n\n") == EVENT
            error = await response.content.readuntil(b"\n\n")
        assert b"ended while it computed this request: an RPC worker was lost" in error


async def test_what_needs_no_slot_counts_as_well(proxy: ProxyHarness) -> None:
    for name in ("chat.1", "chat.2"):
        await watched(proxy, crashing(proxy, name), name)
    for expected in (502, 502, 422):
        async with proxy.http.post("/tokenize", json={"content": "a"}) as response:
            assert response.status == expected


@pytest.mark.parametrize("process_exit", get_args(ProcessExit))
async def test_one_whose_client_has_left_counts_as_well(
    proxy: ProxyHarness, process_exit: ProcessExit
) -> None:
    called = asyncio.Event()

    async def speak(call: Call) -> None:
        called.set()
        await asyncio.Event().wait()

    await watched(proxy, speak, "chat.1")
    for _ in range(2):
        called.clear()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(proxy.send())
            await called.wait()
            asking.cancel()
        await until(lambda: proxy.router.count_in_flight("chat.1") == 0)
        assert proxy.router.note_end("chat.1", process_exit) == 1
        proxy.router.withdraw("chat.1")
        await watched(proxy, speak, "chat.1~2")
        proxy.router.withdraw("chat.1~2")
        await watched(proxy, speak, "chat.1")
    proxy.router.withdraw("chat.1")
    await proxy.fake(name="chat.2")
    assert await status(proxy) == (422 if process_exit == "crashed" else 200)


async def test_an_client_response_clears_the_suspicion(proxy: ProxyHarness) -> None:
    await watched(proxy, crashing(proxy, "chat.1"), "chat.1")
    assert await status(proxy) == 502
    await proxy.fake(name="chat.2")
    assert await status(proxy) == 200
    proxy.router.withdraw("chat.2")
    await watched(proxy, crashing(proxy, "chat.1"), "chat.1")
    assert await status(proxy) == 502
    await proxy.fake(name="chat.3")
    assert await status(proxy) == 200


@pytest.mark.parametrize("is_stream", [True, False])
async def test_one_whose_engine_was_killed_is_answered_by_another(
    proxy: ProxyHarness,
    is_stream: bool,  # noqa: FBT001 (a parameter)
) -> None:
    await watched(proxy, crashing(proxy, "chat.1", "killed"), "chat.1")
    await proxy.fake(say_stream, "chat.2")
    async with proxy.ask(stream=is_stream) as response:
        assert response.status == 200
        assert response.headers["X-Corral-Instance"] == "chat.2"
        await response.read()
    (finished,) = proxy.events("request.finished")
    assert (finished["attempts"], finished["status"]) == (2, 200)


async def test_one_whose_engines_are_killed_twice_gets_an_error_that_clients_may_retry(
    proxy: ProxyHarness,
) -> None:
    for name in ("chat.1", "chat.2", "chat.3"):
        await watched(proxy, crashing(proxy, name, "killed"), name)
    for _ in range(3):
        proxy.router.withdraw("chat.3")
        async with proxy.ask(seed=1) as response:
            assert response.status in {502, 503}
            assert "X-Should-Retry" not in response.headers
            assert (await response.json())["error"]["code"] != "crashes_engine"


async def test_one_that_meets_a_process_that_has_just_died_waits_for_the_next(
    proxy: ProxyHarness,
) -> None:
    gone = Upstream("chat.1", "chat", 2, "/nowhere/x.sock", "", 0, "inner", reports_exit=True)
    proxy.router.admit(gone)
    instance = proxy.router.registry.get("chat.1")
    assert instance
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(status(proxy))
        await until(lambda: any(lease.is_unsent for lease in instance.in_flight))
        assert end(proxy, "chat.1", "crashed") == 0  # it never got the request
        await proxy.fake(name="chat.2")
        assert await asked == 200
