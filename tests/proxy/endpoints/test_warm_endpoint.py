"""The page that has a prompt read ahead."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.proxy_harness import ProxyHarness, model_info, until
from support.upstream import Call, say_ok

from proxy.request.variants import Adapter, Variant

SYSTEM = {"role": "system", "content": "be kind and brief " * 80}
PROMPT = {"messages": [{"role": "system", "content": "be kind"}]}


def ask(
    proxy: ProxyHarness, model: str = "chat", **headers: str
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    return proxy.http.post(f"/corral/v1/models/{model}/warm", json=PROMPT, headers=headers)


@pytest.mark.parametrize("name", ["chat", "vendor/chat"])
async def test_the_response_has_the_tokens_of_each_instance(proxy: ProxyHarness, name: str) -> None:
    async with ask(proxy, name) as response:
        assert response.status == 200
        assert (await response.json())["data"] == [
            {"instance": "chat.0", "tokens": 30, "cached": 12}
        ]
    assert proxy.reader.asked == [("chat", PROMPT)]


async def test_a_variant_applies_to_the_prompt(
    proxy: ProxyHarness,
) -> None:
    thinks = Variant(chat_template_kwargs={"enable_thinking": True})
    proxy.loader.model_infos = [replace(model_info("chat"), variants={"high": thinks})]
    async with ask(proxy, "chat:high") as response:
        assert response.status == 200
    assert proxy.reader.asked == [("chat", {**PROMPT, **thinks.defaults})]


async def test_a_prompt_is_prefilled_with_the_adapter_of_its_name(proxy: ProxyHarness) -> None:
    adapters = (Adapter("legal"), Adapter("poet", 0.5))
    proxy.loader.model_infos = [replace(model_info("chat"), adapters=adapters)]
    for name in ("chat", "chat+poet"):
        async with ask(proxy, name) as response:
            assert response.status == 200
    scales = [[entry["scale"] for entry in body["lora"]] for _, body in proxy.reader.asked]
    assert scales == [[0, 0], [0, 0.5]]


async def test_an_unknown_or_remote_only_model_is_not_found(
    proxy: ProxyHarness,
) -> None:
    proxy.loader.model_infos = [model_info("chat"), replace(model_info("code"), is_local=False)]
    for name in ("chta", "code"):
        async with ask(proxy, name) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "model_not_found")
        assert "available models: chat)" in error["message"]
    assert not proxy.reader.asked


async def test_a_key_cannot_warm_a_hidden_model(proxy: ProxyHarness, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text('[keys.me]\nkey = "corral-me-1234"\nmodels = ["other"]\n')
    await proxy.open(api_keys_file=path)
    async with ask(proxy) as response:
        assert response.status == 401
    async with ask(proxy, Authorization="Bearer corral-me-1234") as response:
        assert response.status == 404
    assert not proxy.reader.asked


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"'])
async def test_a_body_that_is_not_an_object_is_rejected(proxy: ProxyHarness, body: bytes) -> None:
    async with proxy.http.post("/corral/v1/models/chat/warm", data=body) as response:
        assert response.status == 400


async def test_a_foreign_origin_is_rejected(proxy: ProxyHarness) -> None:
    async with ask(proxy, Origin="https://example.com") as response:
        assert response.status == 403


async def test_a_model_prefills_one_prompt_at_a_time(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat"), model_info("code")]
    proxy.reader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(status(proxy, "chat"))
        await until(lambda: len(proxy.reader.asked) == 1)
        async with ask(proxy, "vendor/chat") as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
        second = group.create_task(status(proxy, "code"))
        await until(lambda: len(proxy.reader.asked) == 2)
        proxy.reader.may_go_on.set()
    assert (first.result(), second.result()) == (200, 200)
    assert await status(proxy, "chat") == 200


async def test_a_client_disconnect_cancels_it(proxy: ProxyHarness) -> None:
    proxy.reader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        client = group.create_task(status(proxy, "chat"))
        await until(lambda: bool(proxy.reader.asked))
        client.cancel()
        await proxy.reader.left.wait()
    proxy.reader.may_go_on.set()
    assert await status(proxy, "chat") == 200


async def test_a_draining_server_waits_for_it_as_for_other_requests(
    proxy: ProxyHarness,
) -> None:
    proxy.reader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        client = group.create_task(status(proxy, "chat"))
        await until(lambda: bool(proxy.reader.asked))
        await proxy.server.drain(0)
    assert client.result() == 503


async def test_shared_prefixes_are_learned_from_responses_if_enabled(
    proxy: ProxyHarness,
) -> None:
    await proxy.fake(refuse_some)
    await begin_three(proxy)
    proxy.reader.learning.add("chat")
    await begin_three(proxy, max_tokens="refused")
    assert not proxy.reader.learned
    await begin_three(proxy)
    ((model, opening),) = proxy.reader.learned
    assert (model, opening.body) == ("chat", {"messages": [SYSTEM]})


async def refuse_some(call: Call) -> None:
    if b"refused" in call.body:
        await call.head("Content-Length: 0", status="400 Bad Request")
    else:
        await say_ok(call)


async def begin_three(proxy: ProxyHarness, **members: Any) -> None:
    """Begin three conversations alike."""
    for asked in ("one", "two", "three"):
        messages = [SYSTEM, {"role": "user", "content": asked}]
        async with proxy.ask(messages=messages, **members) as response:
            await response.read()


async def status(proxy: ProxyHarness, model: str) -> int:
    async with ask(proxy, model) as response:
        return response.status
