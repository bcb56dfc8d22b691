"""Nodes load models that they agree to load, are polled until then, and may refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.node import FakeNode, NodesProxy, configured_node
from support.proxy_harness import until
from support.upstream import Call, say_ok

UNLOADED = {"value": "unloaded", "loadable": True}
CHAT = {"id": "chat", "status": UNLOADED, "meta": {"slots": 1}}


class LoadingNode(FakeNode):
    """Loads the requested model once it `may_load`, or refuses with `refusal`."""

    def __init__(self, *entries: dict[str, Any], **options: Any) -> None:
        super().__init__(*entries, **options)
        self.asked: list[str] = []
        self.refusal = ""
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def _answer(self, call: Call) -> None:
        if call.line != "POST /models/load HTTP/1.1":
            await super()._answer(call)
            return
        assert call.headers["X-Corral-Hop"] == "1"
        model = json.loads(call.body)["model"]
        self.asked.append(model)
        status, page = (
            ("503 No", {"error": {"message": self.refusal}}) if self.refusal else ("200 OK", {})
        )
        body = json.dumps(page).encode()
        await call.head(
            "Content-Type: application/json", f"Content-Length: {len(body)}", status=status
        )
        await call.send(body)
        if not self.refusal:
            self._set_state(model, "loading")
            await self.may_load.wait()
            self._set_state(model, "loaded")

    def _set_state(self, model: str, state: str) -> None:
        self.entries = [
            {**entry, "status": {"value": state}} if entry["id"] == model else entry
            for entry in self.entries
        ]


class Place:
    """Nodes of one test, and a front before them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def node(self, *entries: dict[str, Any], **options: Any) -> LoadingNode:
        node = LoadingNode(*entries, **options)
        await node.start()
        self._stack.push_async_callback(node.stop)
        return node

    async def near(self, *nodes: FakeNode, load: str = "idle") -> NodesProxy:
        found = zip(("one", "two"), nodes, strict=False)
        near = NodesProxy(*(configured_node(name, node.url, load=load) for name, node in found))
        await self._stack.enter_async_context(near.running())
        await until(lambda: near.states() == [True] * len(nodes))
        return near


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        yield Place(stack)


async def test_a_model_that_no_machine_has_loaded_is_loaded_by_a_node(place: Place) -> None:
    node = await place.node(CHAT)
    near = await place.near(node)
    assert (await near.models())["chat"]["status"]["value"] == "unloaded"
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(near.ask()) for _ in range(3)]
    assert {call.result()[:2] for call in calls} == {(200, "one/chat")}
    assert node.asked == ["chat"]
    assert near.events("node.load_requested") == ["node.load_requested"]
    assert (await near.models())["chat"]["status"]["value"] == "loaded"


@pytest.mark.parametrize(("load", "status"), [("never", UNLOADED), ("idle", {"value": "unloaded"})])
async def test_without_consent_of_both_no_node_is_asked(
    place: Place, load: str, status: dict[str, Any]
) -> None:
    node = await place.node({**CHAT, "status": status})
    near = await place.near(node, load=load)
    assert "chat" not in await near.models()
    assert (await near.ask())[0] == 404
    assert not node.asked


async def test_a_refusal_is_told_and_remembered(place: Place) -> None:
    node = await place.node(CHAT)
    node.refusal = "chat is not loaded here: there is no memory for it"
    near = await place.near(node)
    for _ in range(2):
        status, _, answer = await near.ask()
        assert status == 503
        assert answer["error"]["message"] == f"chat is unavailable: one: {node.refusal}"
    assert node.asked == ["chat"]
    assert near.events("node.load_refused") == ["node.load_refused"]


async def test_the_next_node_is_asked_where_one_refuses(place: Place) -> None:
    full, free = await place.node(CHAT), await place.node(CHAT)
    full.refusal = "there is no memory for it"
    near = await place.near(full, free)
    assert (await near.ask())[:2] == (200, "two/chat")


async def test_a_node_that_does_not_answer_refuses(place: Place) -> None:
    async def drop(call: Call) -> None:
        call.drop()

    node = FakeNode(CHAT, script=drop)
    await node.start()
    near = await place.near(node)
    status, _, answer = await near.ask()
    assert status == 503
    assert "closed the connection" in answer["error"]["message"]
    await node.stop()


async def test_one_more_node_loads_a_model_while_requests_wait_for_it(place: Place) -> None:
    may_end = asyncio.Event()

    async def wait(call: Call) -> None:
        await may_end.wait()
        await say_ok(call)

    busy = await place.node({**CHAT, "status": {"value": "loaded"}}, script=wait)
    spare = await place.node(CHAT)
    near = await place.near(busy, spare)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(near.ask())
        await busy.calls.get()
        assert not spare.asked
        assert (await near.ask())[:2] == (200, "two/chat")
        assert spare.asked == ["chat"]
        may_end.set()
    assert first.result()[:2] == (200, "one/chat")
