"""Tools that engines run: rights, the answering instance, and fields that cross the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.proxy_harness import ProxyHarness, model_info
from support.upstream import Call

from proxy.request.models import ModelInfo

BODY = {"tool": "read_file", "params": {"path": "a"}}
KEYS = """
[keys.agent]
key = "corral-agent-1234"
tools = true
[keys.root]
key = "corral-root-1234"
admin = true
"""


async def answer(call: Call) -> None:
    fields = ("Content-Type: text/html", "Set-Cookie: a=b", "Content-Length: 2")
    await call.head(*fields)
    await call.send(b"{}")


async def stream(call: Call) -> None:
    await call.head("Content-Type: text/event-stream", "Connection: close")
    await call.send(b'data: {"chunk":"a"}\n\n')
    await call.send(b'data: {"done":true}\n\n')
    call.drop()


def with_tools(name: str = "chat", *, chooses_runtime: bool = True) -> ModelInfo:
    info = model_info(name)
    return replace(info, engine_tools=True, chooses_tool_runtime=chooses_runtime)


async def status(proxy: ProxyHarness, path: str = "/tools", **headers: str) -> int:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    async with proxy.http.post(path, json=BODY, headers=fields) as response:
        return response.status


async def test_without_the_setting_tools_are_refused_as_by_an_engine(proxy: ProxyHarness) -> None:
    fake = await proxy.fake(answer)
    for path in ("/tools", "/cors-proxy?url=http://localhost"):
        assert await status(proxy, path) == 403
        async with proxy.http.get(path) as response:
            assert response.status == 403
            assert "engine_tools = true" in (await response.json())["error"]["message"]
    assert fake.calls.empty()


async def test_a_request_reaches_the_engine_with_the_fields_that_it_reads(
    proxy: ProxyHarness,
) -> None:
    proxy.loader.model_infos = [model_info("other"), with_tools()]
    fake = await proxy.fake(answer)
    headers = {"X-Tool-Cwd": "/srv", "X-Tool-Runtime": "ssh:a", "Cookie": "a=b", "X-Other": "c"}
    async with proxy.http.post("/tools", json=BODY, headers=headers) as response:
        assert (response.status, await response.read()) == (200, b"{}")
        assert "Set-Cookie" not in response.headers
        assert response.headers["Content-Security-Policy"].startswith("sandbox;")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    call = await fake.calls.get()
    assert call.line == "POST /tools HTTP/1.1"
    assert b"read_file" in call.body
    sent = {name.lower(): value for name, value in call.headers.items()}
    assert (sent["x-tool-cwd"], sent["x-tool-runtime"]) == ("/srv", "ssh:a")
    assert sent.keys().isdisjoint({"cookie", "x-other"})


async def test_the_mcp_proxy_gets_the_fields_for_the_other_server_alone(
    proxy: ProxyHarness,
) -> None:
    proxy.loader.model_infos = [with_tools()]
    fake = await proxy.fake(answer)
    headers = {"X-Llama-Server-Proxy-Header-Accept": "text/plain", "Cookie": "a=b"}
    async with proxy.http.get("/cors-proxy?url=http://localhost/a", headers=headers) as response:
        assert response.status == 200
    call = await fake.calls.get()
    assert call.line == "GET /cors-proxy?url=http://localhost/a HTTP/1.1"
    sent = {name.lower() for name in call.headers}
    assert "x-llama-server-proxy-header-accept" in sent
    assert "cookie" not in sent


async def test_a_stream_is_passed_on(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [with_tools()]
    await proxy.fake(stream)
    async with proxy.http.post("/tools", json={**BODY, "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert (await response.read()).endswith(b'{"done":true}\n\n')


async def test_a_model_without_tools_is_refused(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [with_tools(), model_info("plain")]
    await proxy.fake(answer)
    async with proxy.http.post("/tools", json={**BODY, "model": "plain"}) as response:
        assert response.status == 403
    async with proxy.http.post("/tools", json={**BODY, "model": "none"}) as response:
        assert response.status == 404


async def test_a_runtime_that_the_operator_chose_stays(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [with_tools(chooses_runtime=False)]
    fake = await proxy.fake(answer)
    assert await status(proxy, X_Tool_Runtime="ssh:other") == 403
    assert fake.calls.empty()
    assert await status(proxy) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "https://chat.example"},  # in allowed_origins
        {"Origin": "http://localhost:1"},  # another program of this machine
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"X-Forwarded-For": "192.0.2.1"},
        {"Forwarded": "for=192.0.2.1"},
        {"Host": "corral.lan"},
    ],
)
async def test_no_other_page_and_no_other_machine_without_a_key(
    proxy: ProxyHarness, headers: Mapping[str, str]
) -> None:
    await proxy.server.close()
    await proxy.open(allowed_origins=("https://chat.example",), allowed_hosts=("corral.lan",))
    proxy.loader.model_infos = [with_tools()]
    fake = await proxy.fake(answer)
    async with proxy.http.post("/tools", json=BODY, headers=headers) as response:
        assert response.status == 403
    async with proxy.http.get("/tools", headers=headers) as response:
        assert response.status == 403
    assert fake.calls.empty()
    assert await status(proxy, Origin=str(proxy.server.url)) == 200


async def test_with_keys_only_one_with_the_right(proxy: ProxyHarness, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(KEYS, "utf-8")
    await proxy.server.close()
    await proxy.open(api_keys_file=keys)
    proxy.loader.model_infos = [with_tools()]
    fake = await proxy.fake(answer)
    assert await status(proxy) == 401
    assert await status(proxy, Authorization="Bearer corral-wrong-1234") == 401
    assert await status(proxy, Authorization="Bearer corral-root-1234") == 403
    agent = "Bearer corral-agent-1234"
    assert await status(proxy, Authorization=agent, Origin="https://evil.example") == 403
    assert fake.calls.empty()
    assert await status(proxy, Authorization=agent, X_Forwarded_For="192.0.2.1") == 200
    sent = await fake.calls.get()
    assert agent not in sent.headers.values()


async def test_the_instance_with_the_conversation_gets_its_tools(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [with_tools()]
    second = await proxy.fake(name="chat.2")
    headers = {"X-Session-Id": "mine"}
    async with proxy.http.post(
        "/v1/chat/completions",
        json={"model": "chat", "messages": [{"role": "user", "content": "hello"}]},
        headers=headers,
    ) as response:
        assert response.status == 200
    await second.calls.get()
    first = await proxy.fake(answer, "chat.1")
    await status(proxy, X_Session_Id="mine")
    assert (await second.calls.get()).line.startswith("POST /tools")
    assert await status(proxy, X_Session_Id="another") == 200
    assert (await first.calls.get()).line.startswith("POST /tools")
