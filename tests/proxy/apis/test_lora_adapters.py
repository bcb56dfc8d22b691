"""The list of adapters tells no paths, and loads no model."""

import json

from support.proxy_harness import ProxyHarness, model_info
from support.upstream import Call


async def say_adapters(call: Call) -> None:
    body = json.dumps([{"id": 0, "path": "/home/me/a.gguf", "scale": 1.0}]).encode()
    await call.head("Content-Type: application/json", f"Content-Length: {len(body)}")
    await call.send(body)


async def test_a_path_of_the_host_is_not_told(proxy: ProxyHarness) -> None:
    await proxy.fake(say_adapters)
    async with proxy.http.get("/lora-adapters") as response:
        assert await response.json() == [{"id": 0, "path": "a.gguf", "scale": 1.0}]


async def test_looking_does_not_load(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat", "unloaded")]
    async with proxy.http.get("/lora-adapters") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "not_loaded")
    assert not proxy.loader.began.is_set()
