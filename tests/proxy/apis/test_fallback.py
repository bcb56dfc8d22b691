"""A chat whose model cannot be served is answered by the next model of its list."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.proxy_harness import CHAT, ProxyHarness, model_info, until
from support.upstream import Call, Fake

from proxy.errors import (
    Draining,
    NotLoaded,
    ProxyError,
    QueueFull,
    QueueTimeout,
    Unavailable,
    UpstreamCrashed,
    UpstreamShutDown,
)
from proxy.request.models import ModelInfo
from proxy.request.variants import Variant

STOPPED = Unavailable("chat is unavailable: it was stopped", retry_after_s=10)
REFUSED = {"X-Corral-Fallback": "none"}


def chat_with(*fallback: str) -> ModelInfo:
    return replace(model_info("chat"), fallback=fallback)


async def admitted(proxy: ProxyHarness, model: str) -> Fake:
    fake = await proxy.fake(name=f"{model}.1", is_admitted=False)
    proxy.router.admit(fake.upstream(model))
    return fake


@pytest.fixture
async def small(proxy: ProxyHarness) -> Fake:
    """Serves the model small, which answers for chat; chat itself is stopped."""
    proxy.loader.model_infos = [chat_with("small"), model_info("small")]
    proxy.loader.failure = STOPPED
    return await admitted(proxy, "small")


@pytest.mark.parametrize(
    ("error", "is_moved"),
    [
        (STOPPED, True),
        (QueueFull("full"), True),
        (QueueTimeout("waited"), True),
        (UpstreamShutDown("chat.1"), True),
        (UpstreamCrashed("chat.1 crashed"), False),
        (NotLoaded("chat is not loaded"), False),
        (Draining("the daemon stops"), False),
    ],
)
def test_only_a_model_that_cannot_be_served_has_another_answer(
    error: ProxyError, *, is_moved: bool
) -> None:
    assert error.falls_back is is_moved


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_the_next_model_answers_and_every_record_names_it(
    proxy: ProxyHarness, small: Fake, path: str
) -> None:
    body = {**CHAT, "max_tokens": 8, "input": "hello", "store": False}
    async with proxy.http.post(path, json=body) as response:
        await response.read()
    assert response.headers["X-Corral-Fallback"] == "small"
    assert response.headers["X-Corral-Instance"] == "small.1"
    assert json.loads((await small.calls.get()).body)["model"] == "small"
    (event,) = proxy.events("request.finished")
    assert (event["model"], event["fallback_for"]) == ("small", "chat")
    async with proxy.http.get("/metrics") as metrics:
        assert 'corral_fallbacks_total{model="chat"} 1.0' in await metrics.text()


async def test_a_model_that_is_served_answers_itself(proxy: ProxyHarness, small: Fake) -> None:
    chat = await admitted(proxy, "chat")
    async with proxy.ask() as response:
        assert "X-Corral-Fallback" not in response.headers
    assert chat.calls.qsize() == 1
    assert not small.calls.qsize()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/chat/completions", REFUSED),
        ("/v1/chat/completions", {"X-Corral-Hop": "1"}),
        ("/v1/embeddings", {}),
        ("/v1/rerank", {}),
        ("/v1/completions", {}),
        ("/v1/chat/completions/input_tokens", {}),
    ],
)
async def test_what_is_no_chat_or_refuses_gets_the_error(
    proxy: ProxyHarness, small: Fake, path: str, headers: dict[str, str]
) -> None:
    body = {**CHAT, "input": "a", "query": "a", "documents": ["a"], "prompt": "a"}
    async with proxy.http.post(path, json=body, headers=headers) as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
    assert not small.calls.qsize()


async def test_the_first_of_the_list_that_can_answers(proxy: ProxyHarness, small: Fake) -> None:
    infos = [chat_with("chat", "gone", "none", "vendor/small"), model_info("none")]
    proxy.loader.model_infos = [*infos, model_info("small")]
    async with proxy.ask() as response:
        assert response.status == 200
        assert response.headers["X-Corral-Fallback"] == "small"
    assert small.calls.qsize() == 1


async def test_lists_that_name_each_other_end_in_the_first_models_error(
    proxy: ProxyHarness,
) -> None:
    other = replace(model_info("other"), fallback=("chat",))
    proxy.loader.model_infos = [chat_with("other"), other]
    proxy.loader.failure = STOPPED
    async with proxy.ask() as response:
        assert response.status == 503
        assert "chat is unavailable" in await response.text()
    (event,) = proxy.events("request.rejected")
    assert event["model"] == "chat"


async def test_a_variant_may_answer_and_the_clients_members_stay(
    proxy: ProxyHarness, small: Fake
) -> None:
    variant = Variant.model_validate({"temperature": 0.1, "top_p": 0.5})
    brief = replace(model_info("small"), variants={"brief": variant})
    proxy.loader.model_infos = [chat_with("small:brief"), brief]
    async with proxy.ask(temperature=0.7) as response:
        assert response.headers["X-Corral-Fallback"] == "small"
    sent = json.loads((await small.calls.get()).body)
    assert (sent["temperature"], sent["top_p"]) == (0.7, 0.5)


async def test_a_key_that_may_not_use_the_other_model_gets_the_error(
    proxy: ProxyHarness, small: Fake, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text('[keys.me]\nkey = "corral-me-1234"\nmodels = ["chat"]\n', "utf-8")
    await proxy.open(api_keys_file=keys)
    headers = {"Authorization": "Bearer corral-me-1234"}
    async with proxy.http.post("/v1/chat/completions", json=CHAT, headers=headers) as response:
        assert response.status == 503
        assert "small" not in await response.text()
    assert not small.calls.qsize()


async def test_an_instance_that_breaks_off_before_its_first_byte(
    proxy: ProxyHarness, small: Fake
) -> None:
    async def drop(call: Call) -> None:
        call.drop()

    chat = await admitted(proxy, "chat")
    chat.script = drop
    async with proxy.ask() as response:
        assert response.status == 200
        assert response.headers["X-Corral-Fallback"] == "small"
    assert small.calls.qsize() == 1


async def test_an_answer_that_has_begun_is_not_continued_by_another(
    proxy: ProxyHarness, small: Fake
) -> None:
    async def break_off(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n')
        call.drop()

    chat = await admitted(proxy, "chat")
    chat.script = break_off
    async with proxy.ask(stream=True) as response:
        assert b"hi" in await response.content.readany()
        await until(lambda: bool(proxy.events("request.finished")))
    assert not small.calls.qsize()


async def test_a_chat_that_waited_too_long_for_a_slot_moves_on(
    proxy: ProxyHarness, small: Fake
) -> None:
    async def hold(call: Call) -> None:
        await call.until_left()

    chat = await proxy.fake(hold, "chat.1", is_admitted=False)
    proxy.router.admit(chat.upstream(slots=1))
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(proxy.send())
        await chat.calls.get()
        headers = {"Prefer": "wait=0"}
        async with proxy.http.post("/v1/chat/completions", json=CHAT, headers=headers) as response:
            assert response.headers["X-Corral-Fallback"] == "small"
        holding.cancel()
    assert small.calls.qsize() == 1
