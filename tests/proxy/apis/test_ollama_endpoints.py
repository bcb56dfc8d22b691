"""Ollama's API against instances that answer as a test says."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.corral_cli import PATIENCE_S
from support.proxy_harness import CHAT, ProxyHarness, free_port, model_info
from support.upstream import Call, say_ok

from proxy.errors import Unavailable
from proxy.forward import response as response_module
from proxy.request.models import ModelDetails, Residence
from proxy.settings import OllamaSettings, ProxySettings

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"b"}}]}\n\n'
START = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ON = OllamaSettings(enabled=True)
MANAGED = OllamaSettings(enabled=True, manage_models=True)


async def say_b(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(TOKEN)
    await call.chunk(END)
    await call.end()


async def test_a_piece_without_text_is_no_line(proxy: ProxyHarness) -> None:
    """Its line is the first of the body, so the header must go before it."""

    async def say_slowly(call: Call) -> None:
        await call.begin_stream()
        for piece in (START, TOKEN, START, TOKEN, END):
            await call.chunk(piece)
            await asyncio.sleep(0.01)
        await call.end()

    await proxy.open(ollama=ON)
    await proxy.fake(say_slowly)
    async with proxy.http.post("/api/chat", json=CHAT) as response:
        texts = [line["message"]["content"] for line in await lines_of(response)]
    assert texts == ["b", "b", ""]


async def break_off(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(TOKEN)
    call.drop()


async def lines_of(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await response.read()).splitlines()]


async def status_of(proxy: ProxyHarness, method: str, path: str, **sent: Any) -> tuple[int, Any]:
    async with proxy.http.request(method, path, **sent) as response:
        return response.status, json.loads(await response.read() or b"{}")


async def test_without_the_setting_there_is_none(proxy: ProxyHarness) -> None:
    for path in ("/api/version", "/api/tags"):
        async with proxy.http.get(path) as response:
            assert response.status == 404
    async with proxy.http.get("/") as response:
        assert "Ollama" not in await response.text()


async def test_a_separate_address_has_it_beside_the_other_apis(proxy: ProxyHarness) -> None:
    port = free_port()
    await proxy.open(ollama=OllamaSettings(listen=f"127.0.0.1:{port}"))
    await proxy.fake(say_b)
    own = f"http://127.0.0.1:{port}"
    async with proxy.http.get("/api/version") as response:
        assert response.status == 404
    async with proxy.http.get(f"{own}/") as response:
        assert await response.text() == "Ollama is running"
    for path in ("/api/chat", "/v1/chat/completions"):
        async with proxy.http.post(own + path, json=CHAT) as response:
            assert response.status == 200
    async with proxy.http.get(f"{own}/", headers={"Host": "evil.example"}) as response:
        assert response.status == 403
    async with proxy.http.get(f"{own}/", headers={"Origin": "https://evil.example"}) as response:
        assert response.status == 403
    await proxy.server.close()
    with pytest.raises(aiohttp.ClientConnectionError):
        await proxy.http.get(own)


async def test_an_address_in_use_is_named(proxy: ProxyHarness) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = ProxySettings(listen="127.0.0.1:0", ollama=OllamaSettings(listen=listen))
        with pytest.raises(Exception, match=f"cannot listen on {listen}: the port is in use"):
            await proxy.build(settings).start()


def test_both_addresses_cannot_be_one() -> None:
    ollama = OllamaSettings(listen="127.0.0.1:8080")
    with pytest.raises(ValueError, match="set enabled = true"):
        ProxySettings(listen="127.0.0.1:8080", ollama=ollama)


async def test_keys_are_those_of_all_apis(proxy: ProxyHarness, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text('[keys.me]\nkey = "corral-me-1234"\nmodels = ["other"]\n', "utf-8")
    listen = f"127.0.0.1:{free_port()}"
    await proxy.open(ollama=OllamaSettings(listen=listen, manage_models=True), api_keys_file=path)
    proxy.loader.model_infos = [model_info("chat"), model_info("other")]
    url = f"http://{listen}/api"
    assert await status_of(proxy, "GET", f"{url}/tags") == (
        401,
        {"error": "the request has no API key; send Authorization: Bearer KEY"},
    )
    headers = {"Authorization": "Bearer corral-me-1234"}
    _, listed = await status_of(proxy, "GET", f"{url}/tags", headers=headers)
    assert [model["name"] for model in listed["models"]] == ["other:latest"]
    for path_ in ("chat", "show"):
        status, _ = await status_of(proxy, "POST", f"{url}/{path_}", json=CHAT, headers=headers)
        assert status == 404
    status, _ = await status_of(
        proxy, "DELETE", f"{url}/delete", json={"model": "other"}, headers=headers
    )
    assert status == 403
    assert not proxy.ollama.deleted


async def test_a_request_is_routed_like_all_others(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=ON)
    fake = await proxy.fake(say_b)
    sent = {**CHAT, "model": "vendor/chat:latest", "keep_alive": "5m", "stream": False}
    async with proxy.http.post("/api/chat", json=sent) as response:
        assert response.headers["X-Corral-Instance"] == "chat.1"
        answer = await response.json()
    assert answer["model"] == "vendor/chat:latest"
    assert answer["message"] == {"role": "assistant", "content": "b"}
    assert proxy.keep_alives.given == [("chat", 300)]
    asked = json.loads((await fake.calls.get()).body)
    assert (asked["model"], asked["stream"], "keep_alive" in asked) == ("vendor/chat", True, False)
    (record,) = proxy.events("request.finished")
    assert (record["model"], record["status"]) == ("chat", 200)


async def test_a_fallback_answers_in_its_format(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=ON)
    first = replace(model_info("first"), fallback=("chat",))
    proxy.loader.model_infos = [first, model_info("chat")]
    proxy.loader.failure = Unavailable("it failed")
    await proxy.fake(say_b)
    async with proxy.http.post("/api/chat", json={**CHAT, "model": "first"}) as response:
        assert response.headers["X-Corral-Fallback"] == "chat"
        assert [line["done"] for line in await lines_of(response)] == [False, True]


async def test_a_client_that_waits_gets_lines_without_text(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_module, "FIRST_PING_S", 0.01)
    await proxy.open(ollama=ON)
    proxy.loader.may_go_on.clear()
    proxy.loader.asleep = [await proxy.fake(say_b, is_admitted=False)]
    async with proxy.http.post("/api/generate", json={"model": "chat", "prompt": "a"}) as response:
        assert response.headers["Content-Type"] == "application/x-ndjson"
        ping = json.loads(await response.content.readline())
        assert (ping["model"], ping["response"], ping["done"]) == ("chat", "", False)
        proxy.loader.failure = Unavailable("it failed")
        proxy.loader.may_go_on.set()
        assert await lines_of(response) == [{"error": "it failed"}]


async def test_a_stream_that_breaks_off_ends_with_an_error(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=ON)
    await proxy.fake(break_off)
    async with proxy.http.post("/api/chat", json=CHAT) as response:
        assert json.loads(await response.content.readline())["message"]["content"] == "b"
        assert "chat.1" in json.loads(await response.content.readline())["error"]
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()


async def test_an_engines_refusal_is_ollamas(proxy: ProxyHarness) -> None:
    async def refuse(call: Call) -> None:
        body = b'{"error":{"code":400,"message":"no","type":"invalid_request_error"}}'
        await call.head(f"Content-Length: {len(body)}", status="400 Bad Request")
        await call.send(body)

    await proxy.open(ollama=ON)
    await proxy.fake(refuse)
    assert await status_of(proxy, "POST", "/api/chat", json=CHAT) == (400, {"error": "no"})


async def test_a_model_is_loaded_and_let_go_without_a_prompt(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=ON)
    status, answer = await status_of(proxy, "POST", "/api/generate", json={"model": "chat"})
    assert (status, answer["done_reason"], answer["response"]) == (200, "load", "")
    assert proxy.loader.began.is_set()
    proxy.loader.began.clear()
    sent = {"model": "chat", "messages": [], "keep_alive": 0}
    _, answer = await status_of(proxy, "POST", "/api/chat", json=sent)
    assert (answer["done_reason"], answer["message"]["content"]) == ("unload", "")
    assert not proxy.loader.began.is_set()
    assert proxy.ollama.kept == [("chat", 0)]
    proxy.loader.failure = Unavailable("it failed")
    assert await status_of(proxy, "POST", "/api/generate", json={"model": "chat"}) == (
        503,
        {"error": "it failed"},
    )


async def test_models_are_listed(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=ON)
    loaded = replace(model_info("chat"), meta={"size": 9, "ftype": "Q4_K - Medium"})
    proxy.loader.model_infos = [loaded, model_info("rest", "unloaded")]
    proxy.ollama.known["chat"] = ModelDetails("qwen3", "{{ tools }}", ("completion", "tools"))
    proxy.ollama.residences["chat"] = Residence(50, 40, 60)
    _, listed = await status_of(proxy, "GET", "/api/tags")
    chat, rest = listed["models"]
    assert (chat["name"], chat["size"], len(chat["digest"])) == ("chat:latest", 9, 64)
    assert chat["details"]["family"] == "qwen3"
    assert (rest["name"], rest["details"]["families"]) == ("rest:latest", [])
    _, found = await status_of(proxy, "GET", "/api/ps")
    (running,) = found["models"]
    assert (running["size"], running["size_vram"], running["context_length"]) == (50, 40, 2048)
    _, shown = await status_of(proxy, "POST", "/api/show", json={"name": "chat:latest"})
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["qwen3.context_length"] == 2048
    assert (await status_of(proxy, "POST", "/api/show", json={}))[0] == 400


async def test_a_download_tells_its_progress(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=MANAGED)
    async with proxy.http.post("/api/pull", json={"model": "new"}) as response:
        assert response.headers["Content-Type"] == "application/x-ndjson"
        first, half, all_, last = await lines_of(response)
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert half["digest"] == all_["digest"]
    assert [(case["completed"], case["total"]) for case in (half, all_)] == [(40, 100), (100, 100)]
    sent = {"name": "new", "stream": False}
    assert await status_of(proxy, "POST", "/api/pull", json=sent) == (200, {"status": "success"})


async def test_a_download_that_fails_says_so(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=MANAGED)
    proxy.ollama.failure = Unavailable("the disk is full")
    async with proxy.http.post("/api/pull", json={"model": "new"}) as response:
        assert (await lines_of(response))[-1] == {"error": "the disk is full"}
    sent = {"model": "new", "stream": False}
    assert await status_of(proxy, "POST", "/api/pull", json=sent) == (
        503,
        {"error": "the disk is full"},
    )


async def test_a_client_that_leaves_ends_its_download(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=MANAGED)
    proxy.ollama.may_go_on.clear()
    async with proxy.http.post("/api/pull", json={"model": "new"}) as response:
        await response.content.readline()
        response.close()
        await proxy.ollama.left.wait()


async def test_models_change_only_where_that_is_allowed(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=ON)
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        status, answer = await status_of(proxy, method, path, json={"model": "new"})
        assert status == 403
        assert "manage_models" in answer["error"]


async def test_a_model_is_deleted_by_its_own_name(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=MANAGED)
    for name, status in (("vendor/chat", 400), ("nobody", 404), ("chat:latest", 200)):
        found, _ = await status_of(proxy, "DELETE", "/api/delete", json={"model": name})
        assert found == status
    assert proxy.ollama.deleted == ["chat"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("POST", "/api/blobs/sha256:ab"),
        ("GET", "/api/blobs/sha256:ab"),
    ],
)
async def test_what_is_not_served_says_why(proxy: ProxyHarness, method: str, path: str) -> None:
    await proxy.open(ollama=ON)
    status, answer = await status_of(proxy, method, path)
    assert status == 501
    assert path in answer["error"]


async def test_a_slow_model_times_out(proxy: ProxyHarness) -> None:
    await proxy.open(ollama=ON, queue_timeout_s=0.01)
    proxy.loader.may_go_on.clear()
    await proxy.fake(say_ok)
    async with asyncio.timeout(PATIENCE_S):
        status, answer = await status_of(proxy, "POST", "/api/generate", json={"model": "chat"})
    assert status == 503
    assert "chat to load" in answer["error"]
