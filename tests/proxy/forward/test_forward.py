"""Bytes up, bytes down, and breaks on either side."""

import asyncio
import contextlib
import gc
import io
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict
from support.proxy_harness import ProxyHarness
from support.requests import ask
from support.upstream import Call, say_ok
from yarl import URL

from proxy.forward.response import _head
from proxy.router.lease import Activity
from proxy.upstream.upstream import Upstream

EVENT = b'data: {"n":%d}\n\n'
WHOLE = b'data: {"choices":[{"index":0,"finish_reason":"stop","delta":{"content":"hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_chunks_arrive_one_by_one_as_the_instance_sends_them(proxy: ProxyHarness) -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        for number in range(3):
            await call.chunk(EVENT % number)
            assert await seen.get() == number  # the next is sent only once this one was read
        await call.chunk(DONE)
        await call.end()

    await proxy.fake(speak)
    async with proxy.ask(stream=True) as response:
        for number in range(3):
            assert await response.content.readany() == EVENT % number
            seen.put_nowait(number)
        assert await response.content.read() == DONE


@pytest.mark.parametrize("members", [{"stream": True}, {}])
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    proxy: ProxyHarness, members: dict[str, Any]
) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(WHOLE)
        await call.chunk(DONE)
        await call.end()

    await proxy.fake(speak)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):  # objects of the last request may still be in use
            async with proxy.ask(**members) as response:
                assert b"hi" in await response.read()
        gc.collect()
        kept = [type(entry) for entry in gc.garbage if type(entry).__module__.startswith("proxy.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not kept


async def test_a_stream_is_neither_stored_nor_buffered_on_its_way(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(DONE)
        await call.end()

    await proxy.fake(speak)
    async with proxy.ask(stream=True) as response:
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Accel-Buffering"] == "no"


async def test_an_instance_sees_its_own_key_and_not_the_clients(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    headers = {
        "Authorization": "Bearer outer",
        "X-Api-Key": "outer",
        "X-Conversation-Id": "7",
        "Cookie": "a=b",
        "Connection": "X-Private",
        "X-Private": "1",
        "Accept-Encoding": "gzip",
        "anthropic-version": "2023-06-01",
    }
    async with proxy.http.post("/v1/messages", json={"model": "chat"}, headers=headers):
        call = await fake.calls.get()
    assert call.headers["Authorization"] == "Bearer inner"
    assert call.headers["Accept-Encoding"] == "identity"
    assert call.headers["anthropic-version"] == "2023-06-01"
    assert not {"X-Api-Key", "X-Conversation-Id", "Cookie", "X-Private"} & call.headers.keys()


async def test_the_body_passes_byte_for_byte_and_the_query_as_sent(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    body = b'{ "model":"chat",  "prompt" : "\xc3\xa4\\u00e4", "seed": 18446744073709551616 }'
    url = URL(f"{proxy.server.url}/infill?beta=true&x=%2F", encoded=True)
    async with proxy.http.post(url, data=body):
        call = await fake.calls.get()
    assert call.body == body
    assert call.line == "POST /infill?beta=true&x=%2F HTTP/1.1"
    assert call.headers["Content-Type"] == "application/json"


async def test_a_body_larger_than_every_buffer_arrives_whole(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    text = "x" * 90_000
    async with proxy.ask(text=text):
        call = await fake.calls.get()
    assert text.encode() in call.body


async def test_a_compressed_body_is_passed_on_decompressed(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    body = aiohttp.BytesPayload(b'{"prompt": "a"}')
    async with proxy.http.post("/infill", data=body, compress="deflate"):
        call = await fake.calls.get()
    assert call.body == b'{"prompt": "a"}'
    assert "Content-Encoding" not in call.headers


async def test_a_slot_pinned_by_the_client_is_taken_out(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    async with proxy.http.post("/infill", data=b'{"id\\u005fslot": 0, "prompt": "a"}'):
        call = await fake.calls.get()
    assert call.body == b'{"prompt":"a"}'


async def test_an_instance_on_tcp_is_reached_too_and_never_sees_the_clients_key(
    proxy: ProxyHarness,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"outer" not in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        proxy.router.admit(Upstream("tcp", "chat", 1, None, "127.0.0.1", port, ""))
        headers = {"Authorization": "Bearer outer"}
        async with proxy.http.get("/props", headers=headers) as response:
            assert await response.read() == b"ok"


async def test_no_content_stays_without_content(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.head(status="204 No Content")

    await proxy.fake(speak)
    async with proxy.ask() as response:
        assert response.status == 204
        assert "Content-Length" not in response.headers
        assert "Transfer-Encoding" not in response.headers


async def test_an_instances_own_error_passes_as_it_is(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.head("Content-Length: 25", status="400 Bad Request")
        await call.send(b'{"error":{"message":"a"}}')

    await proxy.fake(speak)
    async with proxy.ask("/completion") as response:
        assert (response.status, await response.read()) == (400, b'{"error":{"message":"a"}}')


async def test_an_instance_that_refuses_our_key_is_not_the_clients_fault(
    proxy: ProxyHarness,
) -> None:
    async def speak(call: Call) -> None:
        await call.head("Content-Length: 0", status="401 Unauthorized")

    await proxy.fake(speak)
    async with proxy.ask() as response:
        assert response.status == 502
        assert "chat.1 does not know our key" in (await response.json())["error"]["message"]


async def test_what_an_instance_says_of_cors_and_itself_stays_behind(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.head(
            "Content-Length: 0",
            "Access-Control-Allow-Origin: *",
            "Server: llama.cpp",
            "Keep-Alive: timeout=5",
        )

    await proxy.fake(speak)
    async with proxy.ask() as response:
        assert response.headers["Server"] == "llama-corral"
        assert not {"Access-Control-Allow-Origin", "Keep-Alive"} & response.headers.keys()


# The client leaves.


async def test_a_client_that_leaves_a_stream_closes_the_connection_upstream(
    proxy: ProxyHarness,
) -> None:
    left = asyncio.Event()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT % 0)
        await call.until_left()
        left.set()

    await proxy.fake(speak)
    async with proxy.ask(stream=True) as response:
        await response.content.readany()
        response.close()
    await left.wait()
    await proxy.router.wait_idle("chat.1")
    assert proxy.events("request.finished")[0]["status"] == 499
    assert not proxy.events("upstream.failed")


async def test_a_client_that_leaves_before_the_first_byte_closes_it_too(
    proxy: ProxyHarness,
) -> None:
    fake = await proxy.fake(Call.until_left)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(proxy.send())
        await fake.calls.get()
        asking.cancel()
    await proxy.router.wait_idle("chat.1")
    assert proxy.router.count_in_flight("chat.1") == 0


async def test_a_slow_reader_holds_up_the_instance_and_not_our_memory(proxy: ProxyHarness) -> None:
    sent, block = 0, b"x" * 65536

    async def speak(call: Call) -> None:
        nonlocal sent
        await call.begin_stream()
        await call.chunk(EVENT % 0)
        while sent < 64 * 1024**2:
            async with asyncio.timeout(0.5):  # the test is about the end of this wait
                await call.chunk(block)
            sent += len(block)

    stuck = asyncio.Event()

    async def watched(call: Call) -> None:
        try:
            await speak(call)
        except TimeoutError:
            stuck.set()

    await proxy.fake(watched)
    async with proxy.ask(stream=True):
        await stuck.wait()
        pulse = proxy.router.activity("chat.1")
        assert (pulse.in_flight, pulse.awaiting_upstream, pulse.bytes_received > 0) == (1, 0, True)
    assert sent < 32 * 1024**2


async def test_the_instance_is_awaited_again_once_the_client_has_read_all(
    proxy: ProxyHarness,
) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT % 0)
        await call.until_left()

    await proxy.fake(speak)
    async with proxy.stream(EVENT % 0):
        assert proxy.router.activity("chat.1") == Activity(1, 1, len(EVENT % 0))


# The instance breaks.


async def test_an_instance_that_refuses_is_forgiven_once_and_another_is_asked(
    proxy: ProxyHarness,
) -> None:
    dead = await proxy.fake(name="chat.1")
    await proxy.fake(name="chat.2")
    await dead.stop()
    async with proxy.ask() as response:
        assert response.status == 200
    assert proxy.events("request.finished")[0]["instance"] == "chat.2"
    assert proxy.events("upstream.failed")[0]["phase"] == "request"


async def test_the_second_try_goes_to_another_instance_even_if_that_is_busier(
    proxy: ProxyHarness,
) -> None:
    dead = await proxy.fake(name="chat.1")
    await proxy.fake(name="chat.2")
    await dead.stop()
    async with (
        proxy.router.lease(ask(), avoid={"chat.1"}),
        proxy.ask() as response,
    ):
        assert response.status == 200


async def test_an_instance_that_drops_before_the_first_byte_is_asked_again(
    proxy: ProxyHarness,
) -> None:
    async def drop_once(call: Call) -> None:
        fake.script = say_ok
        call.drop()

    fake = await proxy.fake(drop_once)
    async with proxy.ask() as response:
        assert response.status == 200
    assert fake.calls.qsize() == 2


async def test_a_request_is_tried_twice_and_no_more(proxy: ProxyHarness) -> None:
    async def drop(call: Call) -> None:
        call.drop()

    fake = await proxy.fake(drop)
    async with proxy.ask() as response:
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "upstream_failed"
    assert fake.calls.qsize() == 2
    assert proxy.events("request.finished")[0]["status"] == 502


async def test_a_stream_that_breaks_says_so_and_never_ends_cleanly(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT % 0)
        await broken.wait()
        call.drop()

    broken = asyncio.Event()
    await proxy.fake(speak)
    async with proxy.ask(stream=True) as response:
        assert await response.content.readany() == EVENT % 0
        broken.set()
        event = await response.content.readuntil(b"\n\n")
        assert event.startswith(b'data: {"error":{"message":"chat.1 broke off its answer"')
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    assert proxy.events("upstream.failed")[0]["phase"] == "response"


async def test_anthropics_clients_get_a_named_error_event(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT % 0)
        await broken.wait()
        call.drop()

    broken = asyncio.Event()
    await proxy.fake(speak)
    async with proxy.ask("/v1/messages", stream=True) as response:
        assert await response.content.readany() == EVENT % 0
        broken.set()
        event = await response.content.readuntil(b"\n\n")
    assert event.startswith(b'event: error\ndata: {"type":"error","error":{"type":"api_error"')


async def test_half_an_event_is_not_mended_with_another(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT % 0)
        await call.chunk(b'data: {"half')
        await broken.wait()
        call.drop()

    broken = asyncio.Event()
    await proxy.fake(speak)
    async with proxy.stream(b'data: {"half') as reader:
        broken.set()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


async def test_a_body_shorter_than_announced_ends_in_an_aborted_connection(
    proxy: ProxyHarness,
) -> None:
    async def speak(call: Call) -> None:
        await call.head("Content-Length: 100")
        await call.send(b"short")

    await proxy.fake(speak)
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
        async with proxy.ask() as response:
            await response.read()


async def test_an_instance_that_speaks_no_http_is_a_bad_gateway(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    fake = await proxy.fake(speak)
    async with proxy.ask() as response:
        assert response.status == 502
    assert fake.calls.qsize() == 1


async def test_an_instance_that_stays_silent_is_given_up(proxy: ProxyHarness) -> None:
    await proxy.open(upstream_read_timeout_s=0.05)
    await proxy.fake(Call.until_left)
    async with proxy.ask() as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "upstream_timeout"


async def test_an_instance_that_falls_silent_breaks_the_client_response_off(
    proxy: ProxyHarness,
) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT % 0)
        await call.until_left()

    await proxy.open(upstream_read_timeout_s=0.2)
    await proxy.fake(speak)
    async with proxy.ask(stream=True) as response:
        assert await response.content.readany() == EVENT % 0
        assert b"stopped sending" in await response.content.readuntil(b"\n\n")


async def test_closing_an_instance_breaks_its_streams_off_and_frees_it(proxy: ProxyHarness) -> None:
    left = asyncio.Event()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT % 0)
        await call.until_left()
        left.set()

    await proxy.fake(speak)
    async with proxy.stream(EVENT % 0) as reader:
        await proxy.router.close("chat.1")
        assert proxy.router.count_in_flight("chat.1") == 0
        await left.wait()
        assert b"chat.1 was stopped" in await reader.read()
    assert not proxy.events("upstream.failed")


async def test_closing_an_instance_that_does_not_read_waits_for_nothing(
    proxy: ProxyHarness, socket_directory: Path
) -> None:
    await proxy.open(max_body_bytes=32 * 1024**2)
    started = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        started.set()
        await released.wait()
        writer.transport.abort()

    released = asyncio.Event()
    body = io.BytesIO(b'{"prompt": "%s"}' % (b"x" * 16_000_000))
    async with await asyncio.start_unix_server(serve, socket_directory / "deaf", limit=1024):
        proxy.router.admit(Upstream("deaf", "chat", 1, f"{socket_directory}/deaf", "", 0, ""))
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_status(proxy.http.post("/completion", data=body)))
            await started.wait()
            await proxy.router.close("deaf")
            released.set()
        assert asking.result() == 503


async def test_a_request_of_a_closed_instance_goes_elsewhere_if_nothing_was_sent(
    proxy: ProxyHarness,
) -> None:
    mute = await proxy.fake(Call.until_left, "chat.1")
    well = await proxy.fake(name="chat.2", is_admitted=False)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_status(proxy.ask()))
        await mute.calls.get()
        proxy.router.admit(well.upstream())
        await proxy.router.close("chat.1")
    assert asking.result() == 200
    (finished,) = proxy.events("request.finished")
    assert finished["instance"] == "chat.2"


async def _status(asking: Any) -> int:
    async with asking as response:
        return int(response.status)


async def _stream_two_events(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(WHOLE)
    await call.chunk(DONE)
    await call.end()


STREAM_BODY = b'{"messages":[{"role":"user","content":"hello"}],"stream":true}'


@pytest.mark.parametrize("connection", ["", "Connection: keep-alive\r\n"])
async def test_a_stream_for_http_1_0_ends_with_its_connection(
    proxy: ProxyHarness, connection: str
) -> None:
    await proxy.fake(_stream_two_events)
    async with proxy.raw() as (reader, writer):
        writer.write(
            f"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n{connection}"
            f"Content-Length: {len(STREAM_BODY)}\r\n\r\n".encode()
        )
        writer.write(STREAM_BODY)
        async with asyncio.timeout(60):  # an idle connection stays open for 75 s
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body == WHOLE + DONE


async def test_a_client_that_closes_its_connection_reads_that_it_is_closed(
    proxy: ProxyHarness,
) -> None:
    await proxy.fake(_stream_two_events)
    async with proxy.raw() as (reader, writer):
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(STREAM_BODY), STREAM_BODY)
        )
        answer = await reader.read()
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"\r\n0\r\n\r\n")


def test_a_field_with_a_line_break_is_not_sent() -> None:
    with pytest.raises(ValueError, match="line break"):
        _head("HTTP/1.1", 200, CIMultiDict({"X-Name": "a\r\nX-Other: b"}))
