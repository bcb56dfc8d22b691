"""The real engine's slot is held for an agent's next turn, through each API, or handed over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from support.engine import proxied, running, upstream
from support.proxy_harness import ProxyHarness, until

from proxy.router import slot_holds
from scripts.client_programs import scripted_model
from supervisor.builds.discover import Engine

STORY: Final = "the cat sat on the mat and looked at the moon " * 40
SCHEMA: Final = {"type": "object", "properties": {"command": {"type": "string"}}}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """Return a model that calls the tool `bash` twice, then answers."""
    path = tmp_path_factory.mktemp("models") / "scripted.gguf"
    return scripted_model.make(path, smollm2, ("cat notes.txt", "ls"), ctx=4096)


@pytest.fixture
async def proxy(engine: Engine, model: Path) -> AsyncIterator[ProxyHarness]:
    shape = ("-np", "1", "-c", "4096", "-t", "1", "--no-kv-unified", "-sps", "0", "-cram", "0")
    with running(engine, model, *shape, "--jinja") as socket:
        async with proxied(socket, 1, slot_hold_max_s=20) as proxy:
            proxy.router.admit(replace(upstream(socket, 1), can_name_slots=True))
            yield proxy


class Chat:
    """An agent on one of the APIs."""

    def __init__(self, proxy: ProxyHarness) -> None:
        self._proxy = proxy
        self.messages: list[Json] = [{"role": "user", "content": STORY}]

    async def ask(self) -> Json:
        async with self._proxy.ask(self.path, model="chat", **self.members()) as response:
            answer: Json = await response.json()
            assert response.status == 200, answer
        return answer

    path = "/v1/chat/completions"

    def members(self) -> Json:
        function = {"name": "bash", "description": "", "parameters": SCHEMA}
        return {"messages": self.messages, "tools": [{"type": "function", "function": function}]}

    def take(self, answer: Json) -> int:
        """Add the answer and the results of its calls; return the tokens that were cached."""
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        calls = message["tool_calls"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "notes"} for call in calls
        ]
        self.messages += [message, *results]
        return int(answer["timings"]["cache_n"])


class Messages(Chat):
    path = "/v1/messages"

    def members(self) -> Json:
        tools = [{"name": "bash", "input_schema": SCHEMA}]
        return {"messages": self.messages, "tools": tools, "max_tokens": 100}

    def take(self, answer: Json) -> int:
        assert answer["stop_reason"] == "tool_use"
        content = answer["content"]
        calls = [block for block in content if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "notes"} for call in calls
        ]
        self.messages += [{"role": "assistant", "content": content}]
        self.messages += [{"role": "user", "content": results}]
        return int(answer["usage"]["cache_read_input_tokens"])


class Responses(Chat):
    path = "/v1/responses"

    def members(self) -> Json:
        tool = {"type": "function", "name": "bash", "description": "", "parameters": SCHEMA}
        return {"input": self.messages, "tools": [tool], "store": False}

    def take(self, answer: Json) -> int:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        assert calls
        for call in calls:
            result = {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": "notes",
            }
            self.messages += [call, result]
        return int(answer["usage"]["input_tokens_details"]["cached_tokens"])


def hold_as_long_as(monkeypatch: pytest.MonkeyPatch, left_s: Callable[[float], float]) -> None:
    """Hold for so long, by the time since the answer, and whatever it costs."""

    def best_hold(
        _shares: object, idle_s: float, _limit_s: float, _cost_s: float
    ) -> tuple[float, float]:
        return left_s(idle_s), 1.0

    monkeypatch.setattr(slot_holds, "best_hold", best_hold)
    monkeypatch.setattr(slot_holds, "hold_wait_s", lambda *_, **__: 1e6)


async def stranger(proxy: ProxyHarness, order: list[str]) -> None:
    members: Json = {"messages": [{"role": "user", "content": "what is the word?"}]}
    async with proxy.ask(model="chat", **members) as response:
        assert response.status == 200
        await response.read()
    order.append("stranger")


def waiting(proxy: ProxyHarness) -> int:
    return proxy.router.demand("chat").waiting


@pytest.mark.parametrize("kind", [Chat, Messages, Responses])
async def test_a_stranger_waits_until_the_agent_has_ended(
    proxy: ProxyHarness, kind: type[Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_as_long_as(monkeypatch, lambda _: 20.0)
    agent, order = kind(proxy), list[str]()
    agent.take(await agent.ask())
    async with asyncio.TaskGroup() as group:
        group.create_task(stranger(proxy, order))
        await until(lambda: waiting(proxy) == 1)
        async with proxy.http.get("/corral/v1/slots") as response:
            (slot,) = (await response.json())["slots"]
        assert slot["state"] == "held"
        assert 0 < slot["held_for_s"] <= 20
        second = await agent.ask()
        assert agent.take(second) > 300
        assert order == []
        last = await agent.ask()  # it calls no tool
        assert scripted_model.ANSWER in json.dumps(last)
    assert order == ["stranger"]
    holds = proxy.router.queues["chat"].holds
    assert holds.counts == {"kept": 2}
    async with proxy.http.get("/metrics") as response:
        page = await response.text()
    assert 'corral_slot_holds_total{model="chat",result="kept"} 2.0' in page


async def test_a_stranger_gets_the_slot_when_the_hold_is_over(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_as_long_as(monkeypatch, lambda idle_s: max(0.0, 0.1 - idle_s))
    agent, order = Chat(proxy), list[str]()
    agent.take(await agent.ask())
    await stranger(proxy, order)
    assert not proxy.router.queues["chat"].holds.active
    assert agent.take(await agent.ask()) < 300  # the stranger's prompt took its place
