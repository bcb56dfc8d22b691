"""The page that has a prompt read ahead."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.house import House, card, until
from fakes.upstream import Call, say_ok

from proxy.carry.variant import Variant

SYSTEM = {"role": "system", "content": "be kind and brief " * 80}
PROMPT = {"messages": [{"role": "system", "content": "be kind"}]}


def ask(
    house: House, model: str = "chat", **headers: str
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    return house.http.post(f"/corral/v1/models/{model}/warm", json=PROMPT, headers=headers)


@pytest.mark.parametrize("name", ["chat", "vendor/chat"])
async def test_it_tells_what_each_instance_has_read(house: House, name: str) -> None:
    async with ask(house, name) as response:
        assert response.status == 200
        assert (await response.json())["data"] == [
            {"instance": "chat.0", "tokens": 30, "cached": 12}
        ]
    assert house.reader.asked == [("chat", PROMPT)]


async def test_a_variant_says_what_the_prompt_is_as_it_does_for_requests(house: House) -> None:
    thinks = Variant({"chat_template_kwargs": {"enable_thinking": True}})
    house.loader.cards = [replace(card("chat"), variants={"high": thinks})]
    async with ask(house, "chat:high") as response:
        assert response.status == 200
    assert house.reader.asked == [("chat", {**PROMPT, **thinks.defaults})]


async def test_a_model_that_is_not_there_or_on_another_machine_only_is_not_found(
    house: House,
) -> None:
    house.loader.cards = [card("chat"), replace(card("code"), is_here=False)]
    for name in ("chta", "code"):
        async with ask(house, name) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "model_not_found")
        assert "the models are: chat)" in error["message"]
    assert not house.reader.asked


async def test_a_key_warms_no_model_that_it_may_not_use(house: House, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text('[keys.me]\nkey = "corral-me-1234"\nmodels = ["other"]\n')
    await house.open(keys_file=path)
    async with ask(house) as response:
        assert response.status == 401
    async with ask(house, Authorization="Bearer corral-me-1234") as response:
        assert response.status == 404
    assert not house.reader.asked


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"'])
async def test_a_body_that_is_no_object_is_refused(house: House, body: bytes) -> None:
    async with house.http.post("/corral/v1/models/chat/warm", data=body) as response:
        assert response.status == 400


async def test_a_web_page_of_elsewhere_warms_nothing(house: House) -> None:
    async with ask(house, Origin="https://example.com") as response:
        assert response.status == 403


async def test_one_prompt_is_read_for_a_model_at_a_time(house: House) -> None:
    house.loader.cards = [card("chat"), card("code")]
    house.reader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(status(house, "chat"))
        await until(lambda: len(house.reader.asked) == 1)
        async with ask(house, "vendor/chat") as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
        second = group.create_task(status(house, "code"))
        await until(lambda: len(house.reader.asked) == 2)
        house.reader.may_go_on.set()
    assert (first.result(), second.result()) == (200, 200)
    assert await status(house, "chat") == 200


async def test_a_client_that_leaves_ends_it(house: House) -> None:
    house.reader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        client = group.create_task(status(house, "chat"))
        await until(lambda: bool(house.reader.asked))
        client.cancel()
        await house.reader.left.wait()
    house.reader.may_go_on.set()
    assert await status(house, "chat") == 200


async def test_a_server_that_stops_waits_for_it_no_longer_than_for_others(house: House) -> None:
    house.reader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        client = group.create_task(status(house, "chat"))
        await until(lambda: bool(house.reader.asked))
        await house.server.drain(0)
    assert client.result() == 503


async def test_what_conversations_begin_with_is_learned_of_answers_and_where_wanted(
    house: House,
) -> None:
    await house.fake(refuse_some)
    await begin_three(house)
    house.reader.learning.add("chat")
    await begin_three(house, max_tokens="refused")
    assert not house.reader.learned
    await begin_three(house)
    ((model, opening),) = house.reader.learned
    assert (model, opening.body) == ("chat", {"messages": [SYSTEM]})


async def refuse_some(call: Call) -> None:
    if b"refused" in call.body:
        await call.head("Content-Length: 0", status="400 Bad Request")
    else:
        await say_ok(call)


async def begin_three(house: House, **members: Any) -> None:
    """Begin three conversations alike."""
    for asked in ("one", "two", "three"):
        messages = [SYSTEM, {"role": "user", "content": asked}]
        async with house.ask(messages=messages, **members) as response:
            await response.read()


async def status(house: House, model: str) -> int:
    async with ask(house, model) as response:
        return response.status
