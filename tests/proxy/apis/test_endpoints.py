"""Models are loaded and unloaded by the clients that may use them."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from support.proxy_harness import ProxyHarness, model_info, until

from proxy import app
from proxy.apis.llama_server import ModelControlEndpoints
from proxy.errors import Unavailable

KEY = "12345678"


@pytest.mark.parametrize("name", ["chat", "vendor/chat"])
async def test_a_model_is_loaded_and_unloaded_by_name(proxy: ProxyHarness, name: str) -> None:
    for verb, before in (("load", "unloaded"), ("unload", "loaded"), ("load", "failed")):
        proxy.loader.model_infos = [model_info("chat", before)]  # type: ignore[arg-type]  # a state
        async with proxy.http.post(f"/models/{verb}", json={"model": name}) as response:
            assert (response.status, await response.json()) == (200, {"success": True})
    assert proxy.control.commands == [("load", "chat"), ("unload", "chat"), ("load", "chat")]


@pytest.mark.parametrize(
    ("verb", "state", "reason"),
    [
        ("load", "loaded", "chat is already running"),
        ("load", "loading", "chat is already running"),
        ("unload", "unloaded", "chat is not running"),
        ("unload", "failed", "chat is not running"),
    ],
)
async def test_what_changes_nothing_is_rejected(
    proxy: ProxyHarness, verb: str, state: str, reason: str
) -> None:
    proxy.loader.model_infos = [model_info("chat", state)]  # type: ignore[arg-type]  # a state
    async with proxy.http.post(f"/models/{verb}", json={"model": "chat"}) as response:
        assert (response.status, (await response.json())["error"]["message"]) == (400, reason)
    assert proxy.control.commands == []


async def test_a_model_that_the_operator_stopped_stays_stopped(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat", "failed")]
    proxy.control.failure = Unavailable("chat is stopped")
    async with proxy.http.post("/models/load", json={"model": "chat"}) as response:
        assert response.status == 503


async def test_another_llama_corral_needs_consent(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat", "unloaded"), model_info("small")]
    hop = {"X-Corral-Hop": "1"}
    async with proxy.http.post("/models/load", json={"model": "chat"}, headers=hop) as response:
        assert response.status == 403
        assert "load_for_others" in await response.text()
    async with proxy.http.get("/v1/models", headers=hop) as response:
        assert "loadable" not in await response.text()
    assert not proxy.control.commands
    await proxy.open(load_for_others="idle")
    async with proxy.http.get("/v1/models", headers=hop) as response:
        listed = {entry["id"]: entry["status"] for entry in (await response.json())["data"]}
    assert [listed[name].get("loadable") for name in ("chat", "small")] == [True, None]
    async with proxy.http.get("/v1/models") as response:
        assert "loadable" not in await response.text()
    async with proxy.http.post("/models/load", json={"model": "chat"}, headers=hop) as response:
        assert response.status == 200
    assert proxy.control.commands == [("load for others", "chat")]
    proxy.control.failure = Unavailable("chat is not loaded here: there is no memory", 60)
    async with proxy.http.post("/models/load", json={"model": "chat"}, headers=hop) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "60")


async def test_a_model_of_another_machine_is_not_ours_to_load(proxy: ProxyHarness) -> None:
    here = model_info("chat", "unloaded")
    proxy.loader.model_infos = [
        replace(model_info("far"), is_local=False),
        replace(model_info("chat"), local_only=here),
    ]
    async with proxy.http.post("/models/unload", json={"model": "far"}) as response:
        assert response.status == 400
        assert "another machine" in (await response.json())["error"]["message"]
    async with proxy.http.post("/models/load", json={"model": "chat"}) as response:
        assert response.status == 200  # the node's is loaded, ours is not


async def test_no_model_stands_for_others_here(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [replace(model_info("chat"), is_catch_all=True)]
    proxy.loader.default = "chat"
    for body, status in (({"model": "caht"}, 404), ({}, 400)):
        async with proxy.http.post("/models/unload", json=body) as response:
            assert response.status == status
    assert proxy.control.commands == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model":1}', b'{"model":"nope"}', b"{}"])
async def test_a_body_without_a_known_model_is_the_clients_mistake(
    proxy: ProxyHarness, body: bytes
) -> None:
    proxy.loader.model_infos = [model_info("chat", "unloaded"), model_info("code", "unloaded")]
    async with proxy.http.post("/models/load", data=body) as response:
        assert response.status in {400, 404}
    assert proxy.control.commands == []


async def test_reading_changes_nothing(proxy: ProxyHarness) -> None:
    for verb in ("load", "unload"):
        async with proxy.http.get(f"/models/{verb}?model=chat") as response:
            assert response.status == 405
    assert proxy.control.commands == []


async def next_event(response: aiohttp.ClientResponse) -> dict[str, object]:
    line = await response.content.readline()
    assert await response.content.readline() == b"\n"
    event: dict[str, object] = json.loads(line.removeprefix(b"data: "))
    return event


async def test_changes_are_sent_while_a_client_listens(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/models/sse") as response:
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Request-Id"]
        proxy.control.change()  # of nothing that is shown
        proxy.loader.model_infos = [model_info("chat", "unloaded")]
        proxy.control.change()
        assert await next_event(response) == {
            "model": "chat",
            "event": "status_change",
            "data": {"status": "unloaded", "exit_code": 0},
        }
    await until(lambda: not proxy.control.listening)


async def test_a_silent_stream_is_kept_alive_and_catches_up(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = functools.partial(ModelControlEndpoints, ping_s=0.01)
    monkeypatch.setattr(app, "ModelControlEndpoints", impatient)
    await proxy.open()
    async with proxy.http.get("/models/sse") as response:
        assert await response.content.readline() == b":\n"
        proxy.loader.model_infos = [model_info("chat", "unloaded")]  # a node's: no event tells it
        while not (line := await response.content.readline()).startswith(b"data: "):
            assert line in {b":\n", b"\n"}
        assert b"status_change" in line


async def test_a_stop_ends_the_stream_and_does_not_wait_for_it(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/models/sse") as response:
        await proxy.server.drain(20)
        await proxy.server.close()
        assert await response.read() == b""  # complete: no error


async def test_a_key_has_its_own_models_only(proxy: ProxyHarness, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(f'[keys.a]\nkey = "{KEY}"\nmodels = ["chat"]\n')
    proxy.loader.model_infos = [model_info("chat"), model_info("secret")]
    await proxy.open(api_keys_file=path)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with proxy.http.post("/models/unload", json={"model": "secret"}) as response:
        assert response.status == 401
    async with proxy.http.get("/models/sse") as response:
        assert response.status == 401
    async with proxy.http.post(
        "/models/unload", json={"model": "secret"}, headers=headers
    ) as response:
        assert response.status == 404
    async with proxy.http.get("/models/sse", headers=headers) as response:
        proxy.loader.model_infos = [model_info("chat", "unloaded"), model_info("secret", "failed")]
        proxy.control.change()
        assert (await next_event(response))["model"] == "chat"
    assert proxy.control.commands == []
