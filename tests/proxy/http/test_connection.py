"""The answers to malformed HTTP and to slow requests."""

import asyncio
import contextlib
import json
import zlib
from typing import Any

import pytest
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from support.proxy_harness import ProxyHarness
from support.upstream import Call, say_ok

from proxy.http.connections import parse_failure

HOST = b"Host: localhost\r\n"
POST = b"POST /tokenize HTTP/1.1\r\n" + HOST
GET = b"GET /health HTTP/1.1\r\n" + HOST

NO_HTTP = {
    "both framings": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "one length twice": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a length with a sign": POST + b"Content-Length: +2\r\n\r\n{}",
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    "two codings": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "lines without CR": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "a CR inside a field": GET + b"X: a\rb\r\n\r\n",
    "a folded field": GET + b"X: a\r\n b\r\n\r\n",
    "a space before the colon": GET + b"X : a\r\n\r\n",
    "NUL in a value": GET + b"X: a\0b\r\n\r\n",
    "NUL in a name": GET + b"X\0: a\r\n\r\n",
    "NUL in the path": b"GET /heal\0th HTTP/1.1\r\n" + HOST + b"\r\n",
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": GET + b"Host: evil.example\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + b"x" * 100,
    "a chunk size that is no number": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk size beyond 64 bits": POST
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"f" * 18
    + b"\r\n",
    "a chunk longer than it says": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
    "a chunk line without CR": POST + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n",
}
TOO_LARGE = {
    "a long line": b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a long value": GET + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    "a long name": GET + b"X" * 100_000 + b": y\r\n\r\n",
    "a thousand fields": GET + b"".join(b"X-%d: y\r\n" % i for i in range(1000)) + b"\r\n",
}


async def speak(proxy: ProxyHarness, raw: bytes) -> tuple[int, dict[str, str], Any]:
    """Send bytes, and read the answer and the end of the connection that must follow it."""
    async with proxy.raw() as (reader, writer):
        writer.write(raw)
        answer = (await reader.read()).decode()
    head, _, body = answer.partition("\r\n\r\n")
    line, *fields = head.split("\r\n")
    assert f"Content-Length: {len(body)}" in fields
    return int(line.split()[1]), dict(field.split(": ", 1) for field in fields), json.loads(body)


@pytest.mark.parametrize("raw", NO_HTTP.values(), ids=NO_HTTP.keys())
async def test_what_is_no_http_is_told_so_in_json(
    proxy: ProxyHarness, raw: bytes, caplog: Any
) -> None:
    fake = await proxy.fake()
    status, headers, body = await speak(proxy, raw)
    assert status == 400
    assert headers["Content-Type"].startswith("application/json")
    assert headers["Server"] == "llama-corral"
    assert headers["X-Request-Id"].startswith("req_")
    assert body["error"]["type"] == "invalid_request_error"
    assert "\n" not in body["error"]["message"]
    assert fake.calls.empty()
    assert caplog.text == ""


@pytest.mark.parametrize("raw", TOO_LARGE.values(), ids=TOO_LARGE.keys())
async def test_a_header_over_the_limits_is_too_large(
    proxy: ProxyHarness, raw: bytes, caplog: Any
) -> None:
    status, _, body = await speak(proxy, raw)
    assert status == 431
    assert body["error"]["code"] == "header_too_large"
    assert caplog.text == ""


LIMIT = 32 * 1024


def fields(count_bytes: int) -> bytes:
    """Return header fields of so many bytes, each within its own limit, without an end."""
    field = b"X-%04d: " + b"y" * 990 + b"\r\n"
    return b"".join(field % i for i in range(count_bytes // 1000))


async def test_a_header_that_does_not_end_is_bounded_while_it_is_read(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(GET + fields(100_000))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["message"] == f"the header is larger than {LIMIT} bytes"


async def test_so_is_a_header_in_small_pieces(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(GET)
        for _ in range(LIMIT // 1000 + 1):  # the last is too much
            writer.write(fields(1000))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")


async def test_so_is_one_behind_a_whole_request(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(GET + b"\r\n" + GET + fields(100_000))
        answer = await reader.read()
    assert [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")] in (
        [b"HTTP/1.1 200 OK", b"HTTP/1.1 431 Request Header Fields Too Large"],
        [b"HTTP/1.1 200 OK"],  # closed where the answer to the first was under way
    )


async def test_so_is_one_behind_the_last_byte_of_a_body(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    async with proxy.raw() as (reader, writer):
        writer.write(POST + b"Content-Length: 2\r\n\r\n{")
        await asyncio.sleep(0)
        writer.write(b"}" + GET + fields(200_000))
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1") <= 2
    assert b" 431 " in answer or answer.count(b"HTTP/1.1 200") == 1
    assert fake.calls.qsize() == 1


@pytest.mark.parametrize(
    "flood",
    [b"0\r\n" + fields(100_000), b"2;" + b"x" * 100_000],
    ids=["trailers", "a chunk extension"],
)
async def test_so_are_bytes_beside_a_body(proxy: ProxyHarness, flood: bytes) -> None:
    status, _, body = await speak(proxy, POST + b"Transfer-Encoding: chunked\r\n\r\n" + flood)
    assert status == 400
    assert "larger than 32768 bytes" in body["error"]["message"]


@pytest.mark.parametrize("size", [1, 100, 70_000])
async def test_a_body_in_chunks_of_any_size_is_read(proxy: ProxyHarness, size: int) -> None:
    fake = await proxy.fake()
    body = b'{"content":"' + b"x" * 80_000 + b'"}'
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    async with proxy.raw() as (reader, writer):
        writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert b" 200 " in await reader.readline()
    assert (await fake.calls.get()).body == body


async def test_a_large_body_of_little_bytes_is_read(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    body = b'{"content":"' + b"x" * 90_000 + b'"}'
    packed = zlib.compress(body)
    async with proxy.raw() as (reader, writer):
        size = len(packed)
        writer.write(POST + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % size)
        writer.write(packed + GET + b"Connection: close\r\n\r\n")
        assert (await reader.read()).count(b"HTTP/1.1 200") == 2
    assert (await fake.calls.get()).body == body


async def test_many_requests_at_once_are_all_answered_in_order(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    bodies = [b'{"content":"%d %s"}' % (i, b"x" * 3000) for i in range(60)]
    raw = b"".join(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)
    async with proxy.raw() as (reader, writer):
        writer.write(raw + GET + b"Connection: close\r\n\r\n")
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200") == 61
    assert [(await fake.calls.get()).body for _ in bodies] == bodies


async def test_what_follows_an_upgrade_is_not_kept(proxy: ProxyHarness) -> None:
    upgrade = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with proxy.raw() as (reader, writer):
        writer.write(upgrade + b"x" * 1_000_000)
        with contextlib.suppress(ConnectionError):
            assert (await reader.read()).count(b"HTTP/1.1") <= 1


# How many connections.


async def test_silent_connections_lock_no_client_out(proxy: ProxyHarness) -> None:
    await proxy.open(max_connections=8)
    async with contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(proxy.raw()) for _ in range(8)]
        for _ in range(20):
            async with proxy.raw() as (reader, writer):
                writer.write(GET + b"\r\n")
                assert b" 200 " in await reader.readline()
        assert await silent[0][0].read() == b""


async def test_a_request_under_way_is_not_cut_for_a_new_connection(proxy: ProxyHarness) -> None:
    may_end = asyncio.Event()

    async def wait(call: Call) -> None:
        await may_end.wait()
        await say_ok(call)

    fake = await proxy.fake(wait)
    await proxy.open(max_connections=8)
    async with contextlib.AsyncExitStack() as stack:
        body = b"Content-Length: 2\r\n\r\n{}"
        asked = [await stack.enter_async_context(proxy.raw()) for _ in range(8)]
        for _, writer in asked:
            writer.write(POST + body)
            await fake.calls.get()
        status, headers, content = await speak(proxy, GET + b"\r\n")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "max_connections" in content["error"]["message"]
        may_end.set()
        for reader, _ in asked:
            assert b" 200 " in await reader.readline()
        await speak_well(proxy)


async def speak_well(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(GET + b"\r\n")
        assert b" 200 " in await reader.readline()


async def test_an_unknown_expectation_gets_a_json_error(proxy: ProxyHarness) -> None:
    raw = POST + b"Expect: tea\r\nContent-Length: 2\r\n\r\n{}"
    status, headers, body = await speak(proxy, raw)
    assert status == 417
    assert body["error"]["code"] == "expectation_failed"
    assert headers["X-Request-Id"].startswith("req_")
    assert headers["Connection"] == "close"


@pytest.mark.parametrize("raw", [b"G", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: 1"])
async def test_a_header_that_does_not_end_in_time_is_given_up(
    proxy: ProxyHarness, raw: bytes
) -> None:
    await proxy.open(header_timeout_s=0.05)
    status, headers, body = await speak(proxy, raw)
    assert status == 408
    assert headers["Connection"] == "close"
    assert body["error"]["message"] == "the header did not arrive within 0.05 s"


async def test_the_second_header_of_a_connection_has_its_own_time(proxy: ProxyHarness) -> None:
    await proxy.open(header_timeout_s=0.05)
    async with proxy.raw() as (reader, writer):
        writer.write(GET + b"\r\n")
        await reader.readuntil(b"}")
        writer.write(b"GET /hea")
        assert await reader.readuntil(b"HTTP/1.1 408 Request Timeout")


async def test_a_body_may_take_longer_than_a_header(proxy: ProxyHarness) -> None:
    await proxy.open(header_timeout_s=0.05, body_timeout_s=0.2)
    async with proxy.raw() as (reader, writer):
        writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        await reader.readuntil(b" 100 Continue\r\n\r\n")
        writer.write(b"{")  # of the body: no part of a header
        assert b" 408 " in await reader.readline()
        assert b"the body did not arrive within 0.2 s" in await reader.read()


async def test_a_connection_without_a_byte_is_closed_without_a_word(proxy: ProxyHarness) -> None:
    proxy.idle_timeout_s = 0.05
    await proxy.open()
    async with proxy.raw() as (reader, _):
        assert await reader.read() == b""


def test_the_bytes_themselves_are_not_repeated() -> None:
    error = parse_failure(BadHttpMessage("Bad status line:\n  Bad version:\n\n  b'secret'\n   ^"))
    assert error.message.endswith("HTTP request: Bad status line: Bad version")
    assert "y" * 10 not in parse_failure(LineTooLong(b"y" * 100, 10)).message
    assert "\n" not in parse_failure(BadHttpMessage("odd \x07 words")).message
    assert "\x07" not in parse_failure(BadHttpMessage("odd \x07 words")).message
