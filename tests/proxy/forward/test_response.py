"""The pings of a client that waits for a stream, and its error if it waited in vain."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from support.proxy_harness import ProxyHarness
from support.upstream import Call, Fake, say_ok

from proxy.errors import Unavailable
from proxy.forward import response as response_module

HELLO: Any = [{"role": "user", "content": "hello"}]
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PROGRESS = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}],'
    b'"prompt_progress":{"total":100,"cache":10,"processed":%d,"time_ms":1}}\n\n'
)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_module, "FIRST_PING_S", 0.01)
    monkeypatch.setattr(response_module, "INTERVAL_S", 0.01)


@pytest.fixture
async def client(proxy: ProxyHarness) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{proxy.server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="outer", max_retries=0) as client:
        yield client


async def stream(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(TOKEN)
    await call.chunk(DONE)
    await call.end()


async def sleeping(proxy: ProxyHarness, script: Any = stream) -> Fake:
    """Return an instance that is up only once the loader may go on."""
    fake = await proxy.fake(script, is_admitted=False)
    proxy.loader.asleep.append(fake)
    proxy.loader.may_go_on.clear()
    return fake


async def text_of(asked: Any) -> str:
    return "".join([part.choices[0].delta.content or "" async for part in asked])


async def test_a_load_is_waited_out_with_comments_and_then_answered(proxy: ProxyHarness) -> None:
    await sleeping(proxy)
    async with proxy.ask(stream=True) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert await response.content.readexactly(6) == b":\n\n:\n\n"
        proxy.loader.may_go_on.set()
        assert (await response.read()).lstrip(b":\n") == TOKEN + DONE


async def test_openais_client_reads_over_the_wait(
    client: openai.AsyncOpenAI, proxy: ProxyHarness
) -> None:
    await sleeping(proxy)
    asked = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
    proxy.loader.may_go_on.set()
    assert await text_of(asked) == "hi"


async def test_anthropics_clients_get_pings_in_their_own_words(proxy: ProxyHarness) -> None:
    await sleeping(proxy)
    async with proxy.ask("/v1/messages", stream=True) as response:
        assert (
            await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type": "ping"}\n\n'
        )


async def test_a_wait_in_vain_is_an_error_for_openais_client(
    client: openai.AsyncOpenAI, proxy: ProxyHarness
) -> None:
    await sleeping(proxy)
    asked = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
    proxy.loader.failure = Unavailable("chat cannot be loaded: the file is gone")
    proxy.loader.may_go_on.set()
    with pytest.raises(openai.APIError, match="the file is gone") as failure:
        await text_of(asked)
    assert failure.value.code == "unavailable"


async def test_a_wait_in_vain_is_an_error_for_anthropics_client(proxy: ProxyHarness) -> None:
    await sleeping(proxy)
    proxy.loader.failure = Unavailable("chat cannot be loaded: the file is gone")
    async with anthropic.AsyncAnthropic(
        base_url=proxy.server.url, api_key="outer", max_retries=0
    ) as client:
        asked = await client.messages.create(
            model="chat", messages=HELLO, max_tokens=8, stream=True
        )
        proxy.loader.may_go_on.set()
        with pytest.raises(anthropic.APIStatusError, match="the file is gone"):
            async for _ in asked:
                pass


async def test_an_error_after_a_wait_ends_a_body_that_is_complete(proxy: ProxyHarness) -> None:
    await sleeping(proxy)
    async with proxy.ask(stream=True) as response:
        proxy.loader.failure = Unavailable("no")
        proxy.loader.may_go_on.set()
        body = await response.read()
    assert body.lstrip(b":\n").startswith(b'data: {"error":{"message":"no"')
    assert b"[DONE]" not in body
    assert proxy.events("request.rejected") or proxy.events("request.finished")


async def test_a_client_that_asked_for_no_stream_gets_a_status(proxy: ProxyHarness) -> None:
    await sleeping(proxy)
    proxy.loader.failure = Unavailable("no")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_status(proxy.ask()))
        await proxy.loader.began.wait()
        proxy.loader.may_go_on.set()
    assert asking.result() == 503


async def test_a_long_prefill_is_waited_out_and_its_progress_known(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(PROGRESS % 40)
        await on.wait()
        await call.chunk(PROGRESS % 100 + TOKEN + DONE)
        await call.end()

    on = asyncio.Event()
    await proxy.fake(speak)
    async with proxy.ask(stream=True) as response:
        assert await response.content.readexactly(6) == b":\n\n:\n\n"
        (lease,) = proxy.router.instances()[0].leases
        assert (lease.prompt_done, lease.prompt_total, lease.cached) == (40, 100, 10)
        on.set()
        assert (await response.read()).lstrip(b":\n") == TOKEN + DONE


async def test_another_instance_takes_over_while_nothing_was_said(proxy: ProxyHarness) -> None:
    async def drop(call: Call) -> None:
        proxy.router.admit(well.upstream())
        await call.begin_stream()
        await call.chunk(PROGRESS % 40)
        await waited.wait()
        call.drop()

    waited = asyncio.Event()
    well = await proxy.fake(stream, "chat.2", is_admitted=False)
    await proxy.fake(drop, "chat.1")
    async with proxy.ask(stream=True) as response:
        await response.content.readexactly(3)
        waited.set()
        assert (await response.read()).lstrip(b":\n") == TOKEN + DONE
    assert proxy.events("request.finished")[0]["instance"] == "chat.2"


async def test_what_an_instance_refuses_after_a_wait_is_an_error_of_the_stream(
    client: openai.AsyncOpenAI, proxy: ProxyHarness
) -> None:
    async def refuse(call: Call) -> None:
        body = b'{"error":{"code":400,"message":"no such thing","type":"invalid_request_error"}}'
        await call.head(
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            status="400 Bad Request",
        )
        await call.send(body)

    await sleeping(proxy, refuse)
    asked = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
    proxy.loader.may_go_on.set()
    with pytest.raises(openai.APIError, match="no such thing"):
        await text_of(asked)
    assert proxy.events("request.finished")[0]["status"] == 400


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(
    proxy: ProxyHarness,
) -> None:
    await sleeping(proxy, say_ok)
    async with proxy.ask(stream=True) as response:
        await response.content.readexactly(3)
        response.close()
    proxy.loader.may_go_on.set()
    await proxy.core.server_state.in_flight.wait_empty()
    assert proxy.events("request.rejected") == []


async def _status(asking: Any) -> int:
    async with asking as response:
        return int(response.status)
