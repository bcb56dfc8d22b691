"""One question to all nodes: answers, and why one is missing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from support.corral_cli import PATIENCE_S
from support.node import FakeNode, NodesProxy, configured_node
from support.proxy_harness import until
from support.upstream import Call, Script

from proxy.nodes.gather import NodeAnswer

MODEL = {"id": "chat", "status": {"value": "loaded"}, "meta": {"slots": 2}}


def says(body: bytes, status: str = "200 OK") -> Script:
    async def say(call: Call) -> None:
        await call.head(f"Content-Length: {len(body)}", status=status)
        await call.send(body)

    return say


async def hangs(call: Call) -> None:
    await call.until_left()


async def test_each_node_answers_or_its_problem_is_told() -> None:
    scripts = {
        "good": says(b'{"version": "1"}'),
        "hung": hangs,
        "old": says(b"{}", "404 Not Found"),
        "shut": says(b"{}", "403 Forbidden"),
        "list": says(b"[]"),
        "text": says(b"hello"),
        "huge": says(b" " * (4 * 1024**2 + 1)),
    }
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        configured, fakes = [], {}
        for name, script in scripts.items():
            fakes[name] = node = FakeNode(MODEL, script=script)
            await node.start()
            stack.push_async_callback(node.stop)
            configured.append(configured_node(name, node.url))
        gone = FakeNode(MODEL)
        await gone.start()
        await gone.stop()
        near = NodesProxy(*configured, configured_node("gone", gone.url))
        await stack.enter_async_context(near.running())
        await until(lambda: near.states() == [True] * len(scripts) + [False])
        answers = {found.node: found for found in await near.nodes.ask("usage", {"by": "key,day"})}
        (family,) = near.nodes.metrics()
        up = {sample.labels["node"]: sample.value for sample in family.samples}
        call = await fakes["good"].calls.get()
    assert call.line == "GET /corral/v1/usage?by=key%2Cday HTTP/1.1"
    assert call.headers["X-Corral-Hop"] == "1"
    assert answers["good"] == NodeAnswer("good", {"version": "1"})
    problems = {name: found.problem or "" for name, found in answers.items() if found.problem}
    assert problems["hung"] == "no answer in 0.5 s"
    assert problems["old"] == "it is no llama-corral, or an older one"
    assert "admin" in problems["shut"]
    assert problems["list"] == problems["text"] == "its answer is not that of a llama-corral"
    assert "too large" in problems["huge"]
    assert "takes no connection" in problems["gone"]
    assert up == dict.fromkeys(scripts, 1.0) | {"gone": 0.0}
