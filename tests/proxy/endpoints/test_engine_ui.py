"""Files of llama.cpp's web UI come from an engine; nothing else of the engine does."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.proxy_harness import ProxyHarness, free_port
from support.upstream import Call

from proxy.settings import ProxySettings


async def tells_its_path(call: Call) -> None:
    if " /none" in call.line or "favicon" in call.line:
        await call.head("Content-Length: 0", status="404 Not Found")
        return
    body = call.line.split()[1].encode()
    await call.head("Content-Type: text/html", 'ETag: "1"', f"Content-Length: {len(body)}")
    await call.send(body)


async def sets_cookies(call: Call) -> None:
    fields = (f"{name}: x" for name in ("Set-Cookie", "Clear-Site-Data", "Refresh", "Location"))
    await call.head("Content-Type: text/html", "Content-Length: 2", *fields)
    await call.send(b"hi")


async def opened(proxy: ProxyHarness, keys: Path | None = None) -> str:
    address = f"127.0.0.1:{free_port()}"
    await proxy.server.close()
    await proxy.open(engine_ui=address, api_keys_file=keys)
    return f"http://{address}"


async def test_files_are_passed_on_and_the_api_is_there_too(proxy: ProxyHarness) -> None:
    url = await opened(proxy)
    async with proxy.http.get(f"{url}/") as response:
        assert response.status == 503  # no engine
    await proxy.fake(tells_its_path)
    for path in ("/", "/_app/immutable/bundle.x-1.js", "/apple-touch-icon.png"):
        async with proxy.http.get(url + path) as response:
            assert (response.status, await response.text()) == (200, path)
            assert response.headers["ETag"] == '"1"'
            assert response.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    for path, status in (("/favicon.ico", 404), ("/v1/models", 200), ("/corral/", 404)):
        async with proxy.http.get(url + path) as response:
            assert response.status == status
    async with proxy.http.get("/") as response:  # not at the address of the proxy
        assert "ETag" not in response.headers


async def test_cookies_and_redirects_are_not_passed_on(proxy: ProxyHarness) -> None:
    url = await opened(proxy)
    await proxy.fake(sets_cookies)
    async with proxy.http.get(f"{url}/") as response:
        assert await response.text() == "hi"
        for name in ("Set-Cookie", "Clear-Site-Data", "Refresh", "Location"):
            assert name not in response.headers


@pytest.mark.parametrize(
    "path", ["/_app/../slots", "/_app/%2e%2e/slots", "/favicon//x", "/_app/.x"]
)
async def test_no_other_path_reaches_the_engine(proxy: ProxyHarness, path: str) -> None:
    url = await opened(proxy)
    fake = await proxy.fake(tells_its_path)
    port = int(url.rpartition(":")[2])
    async with proxy.raw(port) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
    assert fake.calls.empty()


async def test_files_need_no_key_and_all_else_does(proxy: ProxyHarness, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text('[keys.a]\nkey = "corral-one-12345"\n', "utf-8")
    url = await opened(proxy, keys)
    await proxy.fake(tells_its_path)
    for path, status in (("/", 200), ("/v1/models", 401), ("/corral/v1/session", 404)):
        async with proxy.http.get(url + path) as response:
            assert response.status == status


def test_it_needs_a_separate_address() -> None:
    with pytest.raises(ValidationError, match="the address is taken"):
        ProxySettings(listen="127.0.0.1:8080", engine_ui="127.0.0.1:8080")
