"""What becomes of requests whose engine crashed: they get their error, and no second engine."""

import asyncio
from dataclasses import replace

import pytest
from fakes.house import House, until
from fakes.upstream import Call, Fake, Script

from proxy.engine.upstream import Upstream

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


async def watched(house: House, script: Script, name: str) -> Fake:
    """Start an instance whose end is told."""
    fake = await house.fake(script, name, is_admitted=False)
    house.dispatch.admit(replace(fake.upstream(), tells_its_end=True))
    return fake


def crashing(house: House, name: str, *, is_crash: bool = True) -> Script:
    """Return what an instance does that dies as soon as it has a request."""

    async def speak(call: Call) -> None:
        call.drop()
        # The connection breaks first; that the process is gone is known later.
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, end, house, name, is_crash)

    return speak


def end(house: House, name: str, is_crash: bool) -> int:  # noqa: FBT001 (for call_later)
    """Tell that a process is gone, as whoever runs it does."""
    computed = house.dispatch.ended(name, is_crash=is_crash)
    house.dispatch.withdraw(name)
    return computed


async def test_a_request_that_its_engine_crashed_with_is_not_tried_again(house: House) -> None:
    for name in ("chat.1", "chat.2"):
        await watched(house, crashing(house, name), name)
    async with house.ask() as response:
        assert response.status == 502
        assert response.headers["X-Should-Retry"] == "false"
        error = (await response.json())["error"]
    assert error["code"] == "upstream_crashed"
    assert "crashed while it computed this request" in error["message"]
    (finished,) = house.events("request.finished")
    assert (finished["tries"], finished["status"]) == (1, 502)
    assert "crashed" in house.events("upstream.broke")[0]["error"]


async def test_one_whose_engine_ended_otherwise_is_tried_again(house: House) -> None:
    await watched(house, crashing(house, "chat.1", is_crash=False), "chat.1")
    await house.fake(name="chat.2")
    async with house.ask() as response:
        assert response.status == 200


async def test_one_that_was_never_sent_is_tried_again(house: House) -> None:
    gone = Upstream("chat.1", "chat", 2, "/nowhere/x.sock", "", 0, "inner", tells_its_end=True)
    house.dispatch.admit(gone)
    await house.fake(name="chat.2")
    async with house.ask() as response:
        assert response.status == 200


async def test_the_second_time_it_is_refused_and_others_are_served(house: House) -> None:
    for name in ("chat.1", "chat.2"):
        await watched(house, crashing(house, name), name)
    for _ in range(2):
        async with house.ask(seed=1) as response:
            assert response.status == 502
    await house.fake(name="chat.3")
    async with house.ask(seed=2) as response:
        assert response.status == 422
        assert (await response.json())["error"]["code"] == "crashes_engine"
    async with house.ask(temperature=0) as response:
        assert response.status == 200
    assert house.events("request.refused")[0]["code"] == "crashes_engine"


async def test_one_that_waited_while_another_like_it_crashed_is_refused_too(house: House) -> None:
    await watched(house, crashing(house, "chat.0"), "chat.0")
    await house.send()
    may_crash = asyncio.Event()

    async def speak(call: Call) -> None:
        await may_crash.wait()
        await crashing(house, "chat.1")(call)

    fake = await house.fake(speak, "chat.1", is_admitted=False)
    house.dispatch.admit(replace(fake.upstream(slots=2), tells_its_end=True))
    async with asyncio.TaskGroup() as group:
        sent = [group.create_task(house.send()) for _ in range(2)]
        await until(lambda: house.dispatch.busy("chat.1") == 2)
        last = group.create_task(status(house))
        await until(lambda: house.dispatch.demand("chat").waiting == 1)
        may_crash.set()
        await asyncio.wait(sent)
        other = await house.fake(name="chat.2")
        assert await last == 422
    assert other.calls.empty()


async def status(house: House) -> int:
    async with house.ask() as response:
        return response.status


async def test_a_stream_under_way_ends_with_the_reason(house: House) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT)
        await crashing(house, "chat.1")(call)

    await watched(house, speak, "chat.1")
    async with house.ask(stream=True) as response:
        assert await response.content.readuntil(b"\n\n") == EVENT
        assert b"crashed while it computed" in await response.content.readuntil(b"\n\n")


async def test_what_needs_no_slot_counts_as_well(house: House) -> None:
    for name in ("chat.1", "chat.2"):
        await watched(house, crashing(house, name), name)
    for expected in (502, 502, 422):
        async with house.http.post("/tokenize", json={"content": "a"}) as response:
            assert response.status == expected


@pytest.mark.parametrize("is_crash", [True, False])
async def test_one_whose_client_has_left_counts_as_well(
    house: House,
    is_crash: bool,  # noqa: FBT001 (a parameter)
) -> None:
    called = asyncio.Event()

    async def speak(call: Call) -> None:
        called.set()
        await asyncio.Event().wait()

    await watched(house, speak, "chat.1")
    for _ in range(2):
        called.clear()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(house.send())
            await called.wait()
            asking.cancel()
        await until(lambda: house.dispatch.busy("chat.1") == 0)
        assert house.dispatch.ended("chat.1", is_crash=is_crash) == 1
        house.dispatch.withdraw("chat.1")
        await watched(house, speak, "chat.1~2")
        house.dispatch.withdraw("chat.1~2")
        await watched(house, speak, "chat.1")
    house.dispatch.withdraw("chat.1")
    await house.fake(name="chat.2")
    assert await status(house) == (422 if is_crash else 200)


async def test_an_answer_clears_the_suspicion(house: House) -> None:
    await watched(house, crashing(house, "chat.1"), "chat.1")
    assert await status(house) == 502
    await house.fake(name="chat.2")
    assert await status(house) == 200
    house.dispatch.withdraw("chat.2")
    await watched(house, crashing(house, "chat.1"), "chat.1")
    assert await status(house) == 502
    await house.fake(name="chat.3")
    assert await status(house) == 200
