"""What a client hears that waits for a stream, and how it learns that it waited in vain."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from fakes.house import House
from fakes.upstream import Call, Fake, say_ok

from proxy.carry import waiting
from proxy.errors import Unavailable

HELLO: Any = [{"role": "user", "content": "hello"}]
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PROGRESS = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}],'
    b'"prompt_progress":{"total":100,"cache":10,"processed":%d,"time_ms":1}}\n\n'
)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "QUIET_S", 0.01)
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.01)


@pytest.fixture
async def client(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{house.server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="outer", max_retries=0) as client:
        yield client


async def stream(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(TOKEN)
    await call.chunk(DONE)
    await call.end()


async def sleeping(house: House, script: Any = stream) -> Fake:
    """Return an instance that is up only once the loader may go on."""
    fake = await house.fake(script, is_admitted=False)
    house.loader.asleep.append(fake)
    house.loader.may_go_on.clear()
    return fake


async def text_of(asked: Any) -> str:
    return "".join([part.choices[0].delta.content or "" async for part in asked])


async def test_a_load_is_waited_out_with_comments_and_then_answered(house: House) -> None:
    await sleeping(house)
    async with house.ask(stream=True) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert await response.content.readexactly(6) == b":\n\n:\n\n"
        house.loader.may_go_on.set()
        assert (await response.read()).lstrip(b":\n") == TOKEN + DONE


async def test_openais_client_reads_over_the_wait(client: openai.AsyncOpenAI, house: House) -> None:
    await sleeping(house)
    asked = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
    house.loader.may_go_on.set()
    assert await text_of(asked) == "hi"


async def test_anthropics_clients_get_pings_in_their_own_words(house: House) -> None:
    await sleeping(house)
    async with house.ask("/v1/messages", stream=True) as response:
        assert (
            await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type": "ping"}\n\n'
        )


async def test_a_wait_in_vain_is_an_error_for_openais_client(
    client: openai.AsyncOpenAI, house: House
) -> None:
    await sleeping(house)
    asked = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
    house.loader.failure = Unavailable("chat cannot be loaded: the file is gone")
    house.loader.may_go_on.set()
    with pytest.raises(openai.APIError, match="the file is gone") as failure:
        await text_of(asked)
    assert failure.value.code == "unavailable"


async def test_a_wait_in_vain_is_an_error_for_anthropics_client(house: House) -> None:
    await sleeping(house)
    house.loader.failure = Unavailable("chat cannot be loaded: the file is gone")
    async with anthropic.AsyncAnthropic(
        base_url=house.server.url, api_key="outer", max_retries=0
    ) as client:
        asked = await client.messages.create(
            model="chat", messages=HELLO, max_tokens=8, stream=True
        )
        house.loader.may_go_on.set()
        with pytest.raises(anthropic.APIStatusError, match="the file is gone"):
            async for _ in asked:
                pass


async def test_an_error_after_a_wait_ends_a_body_that_is_complete(house: House) -> None:
    await sleeping(house)
    async with house.ask(stream=True) as response:
        house.loader.failure = Unavailable("no")
        house.loader.may_go_on.set()
        body = await response.read()
    assert body.lstrip(b":\n").startswith(b'data: {"error":{"message":"no"')
    assert b"[DONE]" not in body
    assert house.events("request.refused") or house.events("request.finished")


async def test_a_client_that_asked_for_no_stream_gets_a_status(house: House) -> None:
    await sleeping(house)
    house.loader.failure = Unavailable("no")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_status(house.ask()))
        await house.loader.began.wait()
        house.loader.may_go_on.set()
    assert asking.result() == 503


async def test_a_long_prefill_is_waited_out_and_its_progress_known(house: House) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(PROGRESS % 40)
        await on.wait()
        await call.chunk(PROGRESS % 100 + TOKEN + DONE)
        await call.end()

    on = asyncio.Event()
    await house.fake(speak)
    async with house.ask(stream=True) as response:
        assert await response.content.readexactly(6) == b":\n\n:\n\n"
        (lease,) = house.dispatch.seats()[0].leases
        assert (lease.prompt_done, lease.prompt_total, lease.cached) == (40, 100, 10)
        on.set()
        assert (await response.read()).lstrip(b":\n") == TOKEN + DONE


async def test_another_instance_takes_over_while_nothing_was_said(house: House) -> None:
    async def drop(call: Call) -> None:
        house.dispatch.admit(well.upstream())
        await call.begin_stream()
        await call.chunk(PROGRESS % 40)
        await waited.wait()
        call.drop()

    waited = asyncio.Event()
    well = await house.fake(stream, "chat.2", is_admitted=False)
    await house.fake(drop, "chat.1")
    async with house.ask(stream=True) as response:
        await response.content.readexactly(3)
        waited.set()
        assert (await response.read()).lstrip(b":\n") == TOKEN + DONE
    assert house.events("request.finished")[0]["instance"] == "chat.2"


async def test_what_an_instance_refuses_after_a_wait_is_an_error_of_the_stream(
    client: openai.AsyncOpenAI, house: House
) -> None:
    async def refuse(call: Call) -> None:
        body = b'{"error":{"code":400,"message":"no such thing","type":"invalid_request_error"}}'
        await call.head(
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            status="400 Bad Request",
        )
        await call.send(body)

    await sleeping(house, refuse)
    asked = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
    house.loader.may_go_on.set()
    with pytest.raises(openai.APIError, match="no such thing"):
        await text_of(asked)
    assert house.events("request.finished")[0]["status"] == 400


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(house: House) -> None:
    await sleeping(house, say_ok)
    async with house.ask(stream=True) as response:
        await response.content.readexactly(3)
        response.close()
    house.loader.may_go_on.set()
    await house.floor.flights.idle()
    assert house.events("request.refused") == []


async def _status(asking: Any) -> int:
    async with asking as response:
        return int(response.status)
