"""Nodes that a name stands for: they come and go with its records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.dns_server import FakeDns
from support.node import FakeNode, NodesProxy, configured_node
from support.proxy_harness import until
from support.upstream import Call, say_ok

from proxy.nodes import configured, nodes

LOADED = {"id": "chat", "status": {"value": "loaded"}, "meta": {"slots": 2}}
NAME = "A corral.test"
FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"


class Network:
    """A name server, and machines that listen on the same port of different addresses."""

    def __init__(self, names: FakeDns, stack: AsyncExitStack) -> None:
        self.names = names
        self._stack = stack
        self._port = 0

    async def machine(self, host: str, **options: Any) -> FakeNode:
        node = FakeNode(LOADED, host=host, port=self._port, **options)
        await node.start()
        self._port = node.port
        self._stack.push_async_callback(node.stop)
        return node

    async def front(
        self, scheme: str = "dns+http", *, also: str | None = None, **options: Any
    ) -> NodesProxy:
        """Return a proxy of the node "pods", and of "more" with another name."""
        hosts = {"pods": "corral.test"} | ({"more": also} if also else {})
        front = NodesProxy(
            *(
                configured_node(
                    name, f"{scheme}://{host}:{self._port}", resolver=self.names.address, **options
                )
                for name, host in hosts.items()
            )
        )
        return await self._stack.enter_async_context(front.running())


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        names = await stack.enter_async_context(FakeDns().running())
        yield Network(names, stack)


def states(front: NodesProxy) -> dict[str, str]:
    return {stat.name: stat.state for stat in front.nodes.stats()}


def problem(front: NodesProxy, name: str = "pods") -> str | None:
    return next(stat.problem for stat in front.nodes.stats() if stat.name == name)


class Held:
    """Answers when `may_go_on` is set."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await self.may_go_on.wait()
        await say_ok(call)


async def say_missing(call: Call) -> None:
    body = b'{"error":{"message":"no such model","code":"model_not_found"}}'
    await call.head(f"Content-Length: {len(body)}", status="404 Not Found")
    await call.send(body)


async def test_machines_come_with_their_records(network: Network) -> None:
    await network.machine(FIRST)
    await network.machine(SECOND)
    front = await network.front()
    await until(lambda: problem(front) == "it has no records")
    assert states(front) == {"pods": "unresolved"}
    assert (await front.ask())[0] == 404
    network.names.records = {NAME: [FIRST]}
    await until(lambda: states(front).get(f"pods@{FIRST}") == "up")
    assert (await front.ask())[:2] == (200, f"pods@{FIRST}/chat")
    network.names.records = {NAME: [FIRST, SECOND]}
    await until(lambda: states(front).get(f"pods@{SECOND}") == "up")
    assert states(front)["pods"] == "resolved"
    assert len(front.router.instances()) == 2


async def test_all_names_together_have_a_bounded_number_of_machines(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (configured, nodes):
        monkeypatch.setattr(module, "ADDRESSES_MAX", 2)
    for host in (FIRST, SECOND, THIRD):
        await network.machine(host)
    network.names.records = {NAME: [FIRST]}
    front = await network.front(also="other.test")
    await until(lambda: states(front).get(f"pods@{FIRST}") == "up")
    network.names.records = {NAME: [FIRST], "A other.test": [SECOND, THIRD]}
    await until(lambda: states(front).get(f"more@{SECOND}") == "up")
    together = "all names together may have 2"
    assert problem(front, "more") == f"it has 2 addresses, of which 1 are used: {together}"
    assert f"more@{THIRD}" not in states(front)
    network.names.records = {NAME: [], "A other.test": [SECOND, THIRD]}
    await until(lambda: states(front).get(f"more@{THIRD}") == "up")
    assert problem(front, "more") is None


async def test_a_machine_whose_record_is_removed_finishes_its_requests(network: Network) -> None:
    held = Held()
    await network.machine(FIRST, script=held)
    await network.machine(SECOND)
    network.names.records = {NAME: [FIRST]}
    front = await network.front()
    await until(lambda: front.router.serves("chat"))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(front.ask())
        await until(lambda: front.router.count_in_flight(f"pods@{FIRST}/chat") == 1)
        network.names.records = {NAME: [SECOND]}
        await until(lambda: states(front).get(f"pods@{SECOND}") == "up")
        assert problem(front, f"pods@{FIRST}") == "its record was removed"
        assert (await front.ask())[:2] == (200, f"pods@{SECOND}/chat")
        held.may_go_on.set()
    assert asking.result()[:2] == (200, f"pods@{FIRST}/chat")
    await until(lambda: f"pods@{FIRST}" not in states(front))
    assert {instance.upstream.name for instance in front.router.instances()} == {
        f"pods@{SECOND}/chat"
    }


async def test_a_name_that_does_not_exist_any_more_has_no_machines(network: Network) -> None:
    await network.machine(FIRST)
    network.names.records = {NAME: [FIRST]}
    front = await network.front()
    await until(lambda: front.router.serves("chat"))
    network.names.records = {}
    await until(lambda: not front.router.serves("chat"))
    assert states(front) == {"pods": "unresolved"}
    assert (await front.ask())[0] == 404


@pytest.mark.parametrize("fault", ["servfail", "silence"])
async def test_machines_stay_while_no_name_server_answers(network: Network, fault: str) -> None:
    await network.machine(FIRST)
    network.names.records = {NAME: [FIRST]}
    front = await network.front()
    await until(lambda: front.router.serves("chat"))
    if fault == "silence":
        network.names.silent = True
    else:
        network.names.failing = {NAME, "AAAA corral.test"}
    await until(lambda: states(front)["pods"] == "unresolved")
    assert str(problem(front)).endswith("; 1 known addresses are kept")
    assert "node.unresolved" in front.events("node.unresolved")
    assert (await front.ask())[:2] == (200, f"pods@{FIRST}/chat")


async def test_services_have_a_port_each(network: Network) -> None:
    one, two = FakeNode(LOADED), FakeNode(LOADED)
    for node in (one, two):
        await node.start()
    network.names.records = {
        "SRV _http._tcp.corral.test": [f"0 0 {node.port} one.test." for node in (one, two)],
        "A one.test": ["127.0.0.1"],
    }
    url = "dns+http://_http._tcp.corral.test"
    front = NodesProxy(configured_node("pods", url, resolver=network.names.address))
    async with front.running():
        await until(lambda: len(front.router.instances()) == 2)
        names = {f"pods@127.0.0.1:{node.port}" for node in (one, two)}
        assert states(front).keys() == names | {"pods"}
    for node in (one, two):
        await node.stop()


async def test_a_llama_corral_among_the_records_leaves_itself_out(network: Network) -> None:
    node = await network.machine(FIRST)
    await network.machine(SECOND)
    network.names.records = {NAME: [FIRST, SECOND]}
    front = await network.front()
    node.process = front.nodes.process
    await until(lambda: states(front) == {"pods": "resolved", f"pods@{SECOND}": "up"})


async def test_a_machine_with_two_addresses_is_one_node(network: Network) -> None:
    for host in (FIRST, SECOND):
        (await network.machine(host)).process = "that one"
    network.names.records = {NAME: [FIRST, SECOND]}
    front = await network.front()
    await until(lambda: front.router.serves("chat"))
    await until(lambda: len(states(front)) == 2)
    assert len(front.router.instances()) == 1


async def test_a_draining_machine_gets_no_turns(network: Network) -> None:
    held = Held()
    first = await network.machine(FIRST, script=held)
    await network.machine(SECOND)
    network.names.records = {NAME: [FIRST]}
    front = await network.front()
    await until(lambda: front.router.serves("chat"))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(front.ask())
        await until(lambda: front.router.count_in_flight(f"pods@{FIRST}/chat") == 1)
        network.names.records = {NAME: [FIRST, SECOND]}
        await until(lambda: len(front.router.instances()) == 2)
        first.is_draining = True
        for _ in range(4):
            assert (await front.ask())[:2] == (200, f"pods@{SECOND}/chat")
        await until(lambda: states(front)[f"pods@{FIRST}"] == "draining")
        assert front.events("node.draining") == ["node.draining"]
        held.may_go_on.set()
    assert asking.result()[0] == 200
    first.is_draining = False
    await until(lambda: states(front)[f"pods@{FIRST}"] == "up")


async def test_a_request_is_moved_on_until_a_machine_takes_it(network: Network) -> None:
    draining, gone, _ = [await network.machine(host) for host in (FIRST, SECOND, THIRD)]
    unloaded = await network.machine("127.0.0.5", script=say_missing)
    network.names.records = {NAME: [FIRST, SECOND, THIRD, "127.0.0.5"]}
    front = await network.front()
    await until(lambda: len(front.router.instances()) == 4)
    await gone.stop()
    draining.is_draining = True
    for _ in range(4):
        assert (await front.ask())[:2] == (200, f"pods@{THIRD}/chat")
    await until(lambda: not unloaded.calls.empty())
