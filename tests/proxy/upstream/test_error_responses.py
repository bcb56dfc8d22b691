"""Every error response is JSON that client libraries understand."""

import json
import logging
import random
from typing import Any, Final

import pytest
from support.proxy_harness import ProxyHarness, model_info
from support.upstream import Call

from proxy.auth.access import OriginPolicy
from proxy.upstream.endpoint_kinds import ENDPOINTS

HOST = b"Host: localhost\r\nConnection: close\r\n"
BODY = b'{"model":"chat","messages":[{"role":"user","content":"a"}],"prompt":"a"}'
TARGETS: Final = (
    *ENDPOINTS["POST"],
    *("/health", "/v1/models", "/v1/models/chat", "/v1/models/none", "/slots", "/props"),
    *("/props?model=none", "/props?model=%ff", "/nothing", "//health", "/v1/models/%2e%2e/x"),
    *("localhost:80", "http://localhost/none", "http://[::1", "/%00", "/v1/models/", "none"),
    *("/a b", "*", "/metrics"),
)
METHODS: Final = ("GET", "POST", "PUT", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "NO", "get", "")
FIELDS: Final = (
    *(b"Range: none", b"Range: bytes=5-1", b"If-Match: *", b"Expect: tea", b"Content-Type: ;;;"),
    *(b"Content-Type: multipart/form-data", b"Content-Type: text/html", b"Content-Length: 5"),
    *(b"Content-Length: -1", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip"),
    *(b"Content-Encoding: gzip", b"Content-Encoding: none", b"Upgrade: h2c", b"Host: evil.example"),
    *(b"Origin: null", b"Sec-Fetch-Site: cross-site", b"Accept: text/html", b"X", b": x", b" x: y"),
    *(b"X: " + b"y" * 12_000, b"X: " + b"y" * 20_000, b"X: \xff", b"X-Request-Id: \x01"),
    *(b"Connection: Upgrade\r\nUpgrade: websocket", b"Sec-WebSocket-Key1: x", b"a: b\r\n" * 110),
    *(b"Authorization: Basic x", b"Cookie: \x80=", b"X-Corral-Hop: 1", b"Prefer: wait=99999999999"),
)
BODIES: Final = (BODY, b"", b"{", b"[]", b"null", b"\xff", b"--x\r\n", b"0\r\n\r\n", b"zz\r\n")


async def reject(call: Call) -> None:
    """As cpp-httplib rejects malformed requests."""
    await call.head("Content-Length: 0", status="416 Range Not Satisfiable")


async def speak(proxy: ProxyHarness, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """The final response to raw bytes."""
    async with proxy.raw() as (reader, writer):
        writer.write(raw)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 100 " in head[:16]:
            head = await reader.readuntil(b"\r\n\r\n")
        line, *fields = head.decode().strip().split("\r\n")
        named = dict(field.lower().split(": ", 1) for field in fields)
        body = await reader.readexactly(int(named.get("content-length", 0)))
    return int(line.split()[1]), named, body


def check(status: int, headers: dict[str, str], body: bytes, path: str) -> None:
    if status < 400:
        return
    assert headers["content-type"].startswith("application/json"), (status, path)
    error = json.loads(body)["error"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["message"]


def some_request(chance: random.Random) -> tuple[str, bytes]:
    """The target and the bytes of a partly malformed request."""
    method, target = chance.choice((*METHODS, *("POST",) * 10)), chance.choice(TARGETS)
    fields = b"".join(field + b"\r\n" for field in chance.sample(FIELDS, chance.randint(0, 2)))
    body = chance.choice((*BODIES, *(BODY,) * 10))
    if chance.random() < 0.8:
        fields += b"Content-Length: %d\r\n" % len(body)
    line = f"{method} {target} HTTP/1.{chance.choice('01119')}\r\n".encode()
    return target, line + HOST + fields + b"\r\n" + body


@pytest.mark.parametrize("seed", range(4))
async def test_every_rejection_of_a_malformed_request_is_json(
    proxy: ProxyHarness, seed: int
) -> None:
    await proxy.fake(reject)
    await proxy.open(body_timeout_s=0.2, header_timeout_s=0.2)
    proxy.loader.model_infos = [model_info("chat")]
    chance, statuses = random.Random(seed), set[int]()  # noqa: S311 (repeatable)
    for _ in range(150):
        target, raw = some_request(chance)
        status, headers, body = await speak(proxy, raw)
        check(status, headers, body, target)
        statuses.add(status)
    assert {400, 403, 404, 405, 416} <= statuses
    assert not {status for status in statuses if status >= 500}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/completion", "/props"])
@pytest.mark.parametrize(
    "error_body", [b"", b"<html>no</html>", b'{"detail": "no"}', b'{"error": "no"}']
)
async def test_an_instances_error_without_a_reason_gets_one(
    proxy: ProxyHarness, path: str, error_body: bytes
) -> None:
    async def send_error(call: Call) -> None:
        await call.head(
            "Content-Type: text/html", f"Content-Length: {len(error_body)}", status="414 Long"
        )
        await call.send(error_body)

    await proxy.fake(send_error)
    asked: Any = proxy.http.get(path) if path == "/props" else proxy.ask(path)
    async with asked as response:
        assert response.status == 414
        assert response.content_type == "application/json"
        content = await response.json()
    assert "414" in content["error"]["message"]
    assert "no" in content["error"]["message"]
    assert content["error"]["type"] == "invalid_request_error"
    assert (content.get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize("line", [b"GET /health", b"POST /v1/messages"])
async def test_an_expectation_that_is_not_text_is_rejected(
    proxy: ProxyHarness, line: bytes
) -> None:
    raw = line + b" HTTP/1.1\r\n" + HOST + b"Expect: \xff\r\n\r\n"
    status, headers, body = await speak(proxy, raw)
    assert status == 417
    check(status, headers, body, line.decode())


async def test_a_disconnect_before_100_continue_is_not_logged(
    proxy: ProxyHarness,
) -> None:
    await proxy.open()
    logger = logging.getLogger("proxy.http")
    for error, is_logged in ((ConnectionResetError(), False), (ValueError(), True)):
        info = (type(error), error, None)
        record = logger.makeRecord("proxy.http", logging.ERROR, "", 0, "it failed", (), info)
        assert bool(logger.filter(record)) == is_logged


@pytest.mark.parametrize("path", ["/health", "/v1/messages"])
async def test_a_fault_of_our_own_is_logged_in_json_wherever_it_is(
    proxy: ProxyHarness, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(OriginPolicy, "check", fail)
    async with proxy.http.post(path, json={}) as response:
        assert response.status == 500
        assert response.content_type == "application/json"
        assert response.headers["Server"] == "llama-corral"
        error = (await response.json())["error"]
    assert "internal error of the proxy" in error["message"]
