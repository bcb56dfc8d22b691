"""Looking at a model's properties: it loads none, and tells no paths."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness, model_info
from support.upstream import Call

from proxy.apis.llama_server import Remembered, without_paths

PAGE = {"model_path": "/home/me/models/chat.gguf", "total_slots": 2, "is_sleeping": False}


async def say_props(call: Call) -> None:
    body = json.dumps(PAGE).encode()
    await call.head("Content-Type: application/json", f"Content-Length: {len(body)}")
    if not call.line.startswith("HEAD"):
        await call.send(body)


async def props(proxy: ProxyHarness) -> tuple[int, dict[str, Any], dict[str, str]]:
    async with proxy.http.get("/props?model=chat") as response:
        return response.status, await response.json(), dict(response.headers)


async def test_a_path_of_the_host_is_not_told(proxy: ProxyHarness) -> None:
    await proxy.fake(say_props)
    status, page, headers = await props(proxy)
    assert (status, page) == (200, {**PAGE, "model_path": "chat.gguf"})
    assert "Age" not in headers
    assert headers["X-Corral-Instance"] == "chat.1"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("state", ["unloaded", "loading"])
async def test_looking_does_not_load(proxy: ProxyHarness, method: str, state: Any) -> None:
    proxy.loader.model_infos = [model_info("chat", state)]
    proxy.loader.asleep = [await proxy.fake(is_admitted=False)]
    async with proxy.http.request(method, "/props?model=chat") as response:
        assert response.status == 503
        assert "Retry-After" not in response.headers
        if method == "GET":
            assert (await response.json())["error"]["code"] == "not_loaded"
    assert not proxy.loader.began.is_set()
    async with proxy.http.post("/tokenize", json={}) as response:
        assert response.status == 200
    assert proxy.loader.began.is_set()


async def test_what_was_said_last_is_remembered_while_the_model_is_away(
    proxy: ProxyHarness,
) -> None:
    fake = await proxy.fake(say_props)
    await props(proxy)
    proxy.router.withdraw(fake.name)
    proxy.emitted.clear()
    status, page, headers = await props(proxy)
    assert (status, page) == (200, {**PAGE, "model_path": "chat.gguf", "is_sleeping": True})
    assert headers["Age"] == "0"
    assert not proxy.loader.began.is_set()
    assert proxy.emitted == []


async def test_a_model_that_has_changed_is_not_remembered(proxy: ProxyHarness) -> None:
    fake = await proxy.fake(say_props)
    await props(proxy)
    proxy.router.withdraw(fake.name)
    proxy.loader.model_infos = [replace(model_info("chat"), context_length=4096)]
    assert (await props(proxy))[0] == 503


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_without_a_name_among_several_models_it_is_the_routers(
    proxy: ProxyHarness, method: str
) -> None:
    proxy.loader.model_infos = [model_info("chat", "unloaded"), model_info("code")]
    async with proxy.http.request(method, "/props?autoload=false") as response:
        assert response.status == 200
        if method == "GET":
            page = await response.json()
            assert (page["role"], page["models_autoload"], page["model_path"]) == (
                "router",
                True,
                "none",
            )
    assert not proxy.loader.began.is_set()


async def test_without_a_name_it_has_the_members_of_the_default_model(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("code"), model_info("chat")]
    proxy.loader.default = "chat"
    async with proxy.http.get("/props") as response:
        assert (await response.json())["model_path"] == "none"
    fake = await proxy.fake(say_props)
    for is_sleeping in (False, True):
        async with proxy.http.get("/props") as response:
            page = await response.json()
        router = {"role": "router", "models_autoload": True}
        shown = {"model_path": "chat.gguf", "is_sleeping": is_sleeping}
        assert page == {**PAGE, **router, **shown}
        assert "role" not in (await props(proxy))[1]
        proxy.router.withdraw(fake.name)


async def test_head_says_no_length_that_get_would_not_have(proxy: ProxyHarness) -> None:
    await proxy.fake(say_props)
    async with proxy.http.head("/props") as response:
        assert response.status == 200
        assert "Content-Length" not in response.headers
        assert await response.read() == b""


async def test_a_page_without_end_is_not_kept(proxy: ProxyHarness) -> None:
    async def flood(call: Call) -> None:
        await call.head("Content-Type: application/json", "Transfer-Encoding: chunked")
        while True:
            await call.chunk(b"x" * 65536)

    await proxy.fake(flood)
    async with asyncio.timeout(PATIENCE_S):
        assert (await props(proxy))[0] == 502


def test_models_that_are_gone_are_forgotten() -> None:
    remembered = Remembered()
    remembered.keep(model_info("a"), b"{}", ["a", "b"])
    remembered.keep(model_info("b"), b"{}", ["b"])
    assert remembered.page(model_info("a")) is None
    assert remembered.page(model_info("b")) is not None


@pytest.mark.parametrize(
    "body", [b"", b"x", b"[1]", b'[{"path":null}]', b"{}", b'{"model_path":null}']
)
def test_what_has_no_path_stays_as_it_is(body: bytes) -> None:
    assert without_paths(body) == body


def test_a_path_of_windows_is_a_path_too() -> None:
    assert without_paths(b'{"model_path":"C:\\\\m\\\\a.gguf"}') == b'{"model_path":"a.gguf"}'
