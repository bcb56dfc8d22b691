"""Models of other machines: listed, routed to, withdrawn on failure, and never in a loop."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.certificates import write_ca
from support.corral_cli import PATIENCE_S
from support.node import SETTINGS, FakeNode, NodesProxy, configured_node
from support.proxy_harness import model_info, until
from support.upstream import Call, Fake, say_ok

from proxy.errors import Unavailable
from proxy.request.variants import Adapter
from proxy.router.lease import Weight
from proxy.upstream import client

LOADED = {"id": "chat", "status": {"value": "loaded"}, "meta": {"slots": 2}}


class Place:
    """Nodes and proxies of one test."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory = directory
        self._stack = stack

    async def node(self, *entries: dict[str, Any], **options: Any) -> FakeNode:
        node = FakeNode(*entries, **options)
        await node.start()
        self._stack.push_async_callback(node.stop)
        return node

    async def near(self, *nodes: FakeNode, **options: Any) -> NodesProxy:
        """A proxy with these nodes, after it has polled them."""
        names = ("one", "two")[: len(nodes)]
        found = zip(names, nodes, strict=True)
        near = NodesProxy(*(configured_node(name, node.url, **options) for name, node in found))
        await self._stack.enter_async_context(near.running())
        await until(lambda: len(near.events("node.up", "node.down")) >= len(nodes))
        return near

    async def local(self, near: NodesProxy, slots: int = 1) -> Fake:
        """Add a local instance."""
        fake = Fake("chat.0", self._directory / "chat.0", say_ok)
        await fake.start()
        self._stack.push_async_callback(fake.stop)
        near.here.model_infos = [model_info("chat")]
        near.router.admit(fake.upstream(slots=slots))
        return fake


@pytest.fixture
async def place(socket_directory: Path) -> AsyncIterator[Place]:
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        yield Place(socket_directory, stack)


class Stuck:
    """Answers requests after `may_go_on`."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await self.may_go_on.wait()
        await say_ok(call)


async def drop(call: Call) -> None:
    call.drop()


async def refuse(call: Call) -> None:
    await call.head("Content-Length: 2", "Retry-After: 1", status="503 Service Unavailable")
    await call.send(b"{}")


async def test_a_remote_only_model_is_listed_and_served(place: Place) -> None:
    node = await place.node({**LOADED, "aliases": ["talk"], "context_length": 2048})
    near = await place.near(node)
    assert (await near.ask("talk"))[:2] == (200, "one/chat")
    assert json.loads((await node.calls.get()).body)["model"] == "chat"
    listed = (await near.models())["chat"]
    assert listed["status"]["value"] == "loaded"
    assert (listed["context_length"], listed["meta"]["slots"]) == (2048, 2)
    [stats] = near.nodes.stats()
    assert stats.received_bytes > 0


async def test_a_request_to_a_node_has_its_key_path_and_model_name(place: Place) -> None:
    node = await place.node({"id": "vendor/chat", "aliases": ["chat"]})
    near = NodesProxy(configured_node("far", f"{node.url}/api", api_key="secret"))
    async with near.running():
        await until(lambda: near.states() == [True])
        near.here.model_infos = [model_info("chat")]
        near.look_again()
        await until(lambda: near.router.serves("chat"))
        await near.ask("chat", Authorization="Bearer ours")
    call = await node.calls.get()
    assert call.line == "POST /api/v1/chat/completions HTTP/1.1"
    assert call.headers["Authorization"] == "Bearer secret"
    assert call.headers["X-Corral-Hop"] == "1"
    assert json.loads(call.body)["model"] == "vendor/chat"
    assert {look.headers["Authorization"] for look in node.looks} == {"Bearer secret"}


async def test_a_nodes_variant_is_applied_there_in_the_slots_of_its_model(place: Place) -> None:
    high = {**LOADED, "id": "chat:high", "variant_of": "chat"}
    node = await place.node(LOADED, high)
    near = await place.near(node)
    assert list(await near.models()) == ["chat", "chat:high"]
    assert [instance.upstream.slots for instance in near.router.instances()] == [2]
    assert (await near.ask("chat:high"))[0] == 200
    assert json.loads((await node.calls.get()).body)["model"] == "chat:high"


async def test_a_variant_that_only_a_node_has_is_not_computed_here(place: Place) -> None:
    node = await place.node(LOADED, {**LOADED, "id": "chat:high", "variant_of": "chat"})
    near = await place.near(node)
    fake = await place.local(near)
    near.look_again()
    for _ in range(2):
        assert (await near.ask("chat:high"))[0] == 200
        assert json.loads((await node.calls.get()).body)["model"] == "chat:high"
    assert fake.calls.empty()
    assert (await near.ask("chat"))[0] == 200
    assert not fake.calls.empty()


async def test_an_adapter_is_asked_by_name_of_a_node_that_has_it(place: Place) -> None:
    node = await place.node(LOADED, {**LOADED, "id": "chat+legal", "variant_of": "chat"})
    near = await place.near(node)
    adapters = (Adapter("poet"), Adapter("legal"))
    near.here.model_infos = [replace(model_info("chat"), adapters=adapters)]
    near.look_again()
    for name in ("chat+legal", "chat"):
        assert (await near.ask(name))[0] == 200
        sent = json.loads((await node.calls.get()).body)
        assert (sent["model"], "lora" in sent) == (name, False)
    fake = await place.local(near)
    near.here.model_infos = [replace(model_info("chat"), adapters=adapters)]
    near.look_again()
    for _ in range(2):
        assert (await near.ask("chat+poet"))[0] == 200
        sent = json.loads((await fake.calls.get()).body)
        assert sent["lora"] == [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.0}]
    assert node.calls.empty()


async def test_models_that_a_node_has_not_loaded_are_not_listed(place: Place) -> None:
    entries = [{"id": name, "status": {"value": name}} for name in ("unloaded", "loading")]
    near = await place.near(await place.node(LOADED, *entries))
    assert list(await near.models()) == ["chat"]
    assert (await near.ask("unloaded"))[0] == 404


async def test_only_the_configured_models_are_served(place: Place) -> None:
    node = await place.node(LOADED, {"id": "other"})
    near = await place.near(node, models=frozenset({"other"}))
    assert list(await near.models()) == ["other"]


@pytest.mark.parametrize(("slots", "leases"), [(3, 3), (None, 4)])
async def test_a_node_gets_as_many_requests_as_it_has_slots(
    place: Place, slots: int | None, leases: int
) -> None:
    node = FakeNode({"id": "chat"})
    node.slots = slots
    await node.start()
    near = await place.near(node)
    assert [instance.upstream.slots for instance in near.router.instances()] == [leases]
    await node.stop()


async def test_a_node_gets_requests_when_no_local_slot_is_free(place: Place) -> None:
    near = await place.near(await place.node(LOADED))
    local = await place.local(near)
    assert (await near.ask())[1] == "chat.0"
    stuck = local.script = Stuck()
    near.look_again()
    await until(lambda: len(near.router.instances()) == 2)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(near.ask())
        await until(lambda: bool(near.router.count_in_flight("chat.0")))
        assert (await near.ask())[1] == "one/chat"
        stuck.may_go_on.set()
    assert first.result()[1] == "chat.0"


async def test_a_node_serves_a_local_model_that_is_not_loaded(place: Place) -> None:
    near = await place.near(await place.node(LOADED))
    near.here.model_infos = [model_info("chat", "unloaded")]
    assert (await near.ask())[1] == "one/chat"
    assert (await near.models())["chat"]["status"]["value"] == "loaded"
    assert not near.here.began.is_set()


async def test_requests_at_a_node_are_not_demand_for_the_local_model(place: Place) -> None:
    stuck = Stuck()
    node = await place.node(LOADED, script=stuck)
    near = await place.near(node)
    near.here.model_infos = [model_info("chat", "unloaded")]
    async with asyncio.TaskGroup() as group:
        group.create_task(near.ask())
        await until(lambda: bool(near.router.count_in_flight("one/chat")))
        assert near.router.demand("chat").working == 0
        stuck.may_go_on.set()
    assert near.router.demand("chat").idle_since_s < 0


async def test_a_nodes_own_metrics_are_not_scraped(place: Place) -> None:
    node = await place.node(LOADED)
    near = await place.near(node)
    async with near.http.get("/metrics") as response:
        page = await response.text()
    assert 'corral_slots{model="chat",model_instance="one/chat"} 2.0' in page
    assert node.calls.empty()


@pytest.mark.parametrize("script", [drop, refuse])
async def test_a_request_is_retried_on_another_node_before_the_first_byte(
    place: Place, script: Any
) -> None:
    nodes = await place.node(LOADED, script=script), await place.node(LOADED)
    near = await place.near(*nodes)
    assert (await near.ask())[:2] == (200, "two/chat")


async def test_a_node_that_stops_gets_no_requests_until_it_answers_again(place: Place) -> None:
    node = await place.node(LOADED)
    near = await place.near(node)
    await node.stop()
    status, _, answer = await near.ask()
    assert status == 503
    assert "one: takes no connection" in answer["error"]["message"]
    assert (await near.models())["chat"]["status"]["failed"]
    assert near.events("node.up", "node.down") == ["node.up", "node.down"]
    await node.start()
    await until(lambda: near.states() == [True])
    assert (await near.ask())[0] == 200
    assert near.events("node.up", "node.down") == ["node.up", "node.down", "node.up"]


async def test_a_node_is_down_after_two_failures(place: Place) -> None:
    node = await place.node(LOADED)
    near = await place.near(node)
    node.failures, polls = 1, len(node.looks)
    await until(lambda: len(node.looks) > polls + 1)
    assert near.events("node.up", "node.down") == ["node.up"]
    node.failures = 2
    story = ["node.up", "node.down", "node.up"]
    await until(lambda: near.events("node.up", "node.down") == story)


async def test_a_node_that_rejects_the_key_is_down_with_the_reason(place: Place) -> None:
    near = await place.near(await place.node(LOADED, key="theirs"), api_key="ours")
    assert near.events("node.up", "node.down") == ["node.down"]
    assert near.nodes.stats()[0].problem == "does not know our key; see its key_file"


async def test_a_client_disconnect_causes_no_poll(place: Place) -> None:
    stuck = Stuck()
    node = await place.node(LOADED, script=stuck)
    near = await place.near(node)
    looks = len(node.looks)
    asked = asyncio.get_running_loop().create_task(near.ask())
    await (await node.calls.get()).reader.read(0)
    asked.cancel()
    await asyncio.wait([asked])
    await until(lambda: not near.router.count_in_flight("one/chat"))
    assert not near.router.instances()[0].leases
    assert len(node.looks) == looks


async def test_a_forwarded_request_is_not_forwarded_again(place: Place) -> None:
    near = await place.near(await place.node(LOADED))
    hop = {"X-Corral-Hop": "1"}
    assert await near.models(**hop) == {}
    assert (await near.ask(**hop))[0] == 404
    near.here.model_infos = [model_info("chat", "unloaded")]
    assert (await near.models(**hop))["chat"]["status"]["value"] == "unloaded"
    assert (await near.ask(**hop))[0] == 503
    assert not near.here.began.is_set()


async def test_nodes_that_name_each_other_do_not_loop(place: Place) -> None:
    one = NodesProxy()
    async with one.running():
        two = NodesProxy(configured_node("one", one.server.url))
        async with two.running():
            third = NodesProxy(configured_node("two", two.server.url))
            third.here.model_infos = [model_info("chat", "unloaded")]
            async with third.running():
                await until(lambda: third.states() == [True])
                assert await two.models() == {}
                assert (await third.ask())[0] == 503


@pytest.fixture
def system_cas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of the CAs that the system trusts; it is read once."""
    monkeypatch.setenv("SSL_CERT_FILE", str(path := tmp_path / "cas.pem"))
    client.system_tls.cache_clear()
    yield path
    client.system_tls.cache_clear()


async def test_a_node_can_use_tls(place: Place, system_cas: Path) -> None:
    authority = trustme.CA()
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(own)
    node = FakeNode(LOADED)
    await node.start(own)
    url = node.url.replace("http:", "https:")
    untrusting = NodesProxy(configured_node("one", url))
    async with untrusting.running():
        await until(lambda: bool(untrusting.events("node.down")))
        problem = untrusting.nodes.stats()[0].problem or ""
        assert "cannot be verified: unable to get local issuer" in problem
    write_ca(system_cas, authority)
    client.system_tls.cache_clear()
    near = NodesProxy(configured_node("one", url))
    async with near.running():
        await until(lambda: near.states() == [True])
        assert (await near.ask())[:2] == (200, "one/chat")
    await node.stop()


async def test_nodes_can_be_added_removed_and_changed(place: Place) -> None:
    one, two = await place.node(LOADED), await place.node({"id": "other"})
    near = await place.near(one)
    (before,) = near.nodes.stats()
    stays = configured_node("one", one.url)
    near.nodes.set_nodes([stays, configured_node("two", two.url)])
    await until(lambda: near.router.serves("other"))
    assert (await near.ask("other"))[:2] == (200, "two/other")
    assert near.nodes.stats()[0] == before
    near.nodes.set_nodes([stays, configured_node("two", one.url)])
    assert near.states() == [True, False]
    await until(lambda: near.states() == [True, True])
    near.nodes.set_nodes([configured_node("two", one.url)])
    assert (await near.ask("chat"))[:2] == (200, "two/chat")
    assert near.events("node.up", "node.down") == ["node.up"] * 3
    near.nodes.set_nodes([])
    assert (await near.ask("chat"))[0] == 404


async def test_a_removed_node_finishes_its_requests(place: Place) -> None:
    stuck = Stuck()
    near = await place.near(await place.node(LOADED, script=stuck))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(near.ask())
        await until(lambda: near.router.count_in_flight("one/chat") == 1)
        near.nodes.set_nodes([])
        assert not near.router.serves("chat")
        stuck.may_go_on.set()
    assert asking.result()[:2] == (200, "one/chat")


async def test_no_request_waits_for_a_removed_node(place: Place) -> None:
    node = await place.node(LOADED)
    near = await place.near(node)
    node.may_answer.clear()
    near.look_again()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(refusal(near))
        await asyncio.sleep(0)  # it waits now
        near.nodes.set_nodes([])
    assert "it is no longer configured" in waiting.result()


async def refusal(near: NodesProxy) -> str:
    with pytest.raises(Unavailable) as refused:
        await near.nodes.ensure_ready("chat")
    return refused.value.message


async def test_another_model_answers_while_no_node_has_the_one_of_its_name(place: Place) -> None:
    node = await place.node({**LOADED, "id": "far"})
    await node.stop()
    settings = SETTINGS.model_copy(update={"fallback": {"far": ("chat",)}})
    near = NodesProxy(configured_node("one", node.url), settings=settings)
    await place.local(near)
    async with near.running():
        await until(lambda: bool(near.events("node.down")))
        assert (await near.ask("far"))[:2] == (200, "chat.0")  # no node has ever had it
        assert (await near.models())["far"]["status"]["value"] == "unloaded"
        await node.start()
        await until(lambda: near.states() == [True])
        assert (await near.ask("far"))[:2] == (200, "one/far")
        await node.stop()
        assert (await near.ask("far"))[:2] == (200, "chat.0")
        near.nodes.set_nodes(())  # as a machine that is no longer listed
        assert (await near.ask("far"))[:2] == (200, "chat.0")


async def test_a_request_waits_for_a_machine_that_is_started_on_demand(place: Place) -> None:
    node = await place.node(LOADED)
    await node.stop()
    far = configured_node("far", node.url, models=("chat",), on_demand=True)
    near = NodesProxy(far)
    async with near.running(), asyncio.TaskGroup() as group:
        await until(lambda: bool(near.events("node.down")))
        assert (await near.models())["chat"]["status"]["value"] == "unloaded"
        waiting = group.create_task(near.ask())
        await until(lambda: near.router.demand("chat").waiting == 1)
        await node.start()
        assert (await waiting)[:2] == (200, "far/chat")
        near.nodes.set_nodes(())
        assert (await near.ask())[0] == 404
        near.nodes.set_nodes([far])
        await until(lambda: near.router.serves("chat"))


@pytest.mark.parametrize("directory", ["empty", "missing"])
async def test_a_model_that_nobody_starts_is_still_loading(tmp_path: Path, directory: str) -> None:
    (tmp_path / "empty").mkdir()
    url = f"file+http://{tmp_path}/{directory}/*.json"
    settings = SETTINGS.model_copy(update={"queue_timeout_s": 0.1})
    far = configured_node("far", url, models=("chat",), on_demand=True)
    async with NodesProxy(far, settings=settings).running() as near:
        status, _, answer = await near.ask()
        assert (status, answer["error"]["code"]) == (503, "model_loading")


async def test_a_wait_ends_when_machines_are_no_longer_started_on_demand(place: Place) -> None:
    node = await place.node(LOADED)
    await node.stop()
    near = NodesProxy(configured_node("far", node.url, models=("chat",), on_demand=True))
    async with near.running(), asyncio.TaskGroup() as group:
        waiting = group.create_task(refusal(near))
        await until(lambda: bool(near.events("node.down")))
        near.nodes.set_nodes([])
    assert waiting.result() == "chat is unavailable: no node has it"


async def test_a_batch_request_is_one_on_the_node_too(place: Place) -> None:
    node = await place.node(LOADED)
    near = await place.near(node)
    await near.ask(**{"X-Corral-Priority": "batch"})
    assert (await node.calls.get()).headers["X-Corral-Priority"] == "batch"
    await near.ask()
    assert "X-Corral-Priority" not in (await node.calls.get()).headers


async def test_another_llama_corral_is_told_how_long_a_model_stays(place: Place) -> None:
    node = await place.node(LOADED)
    near = await place.near(node)
    for process, sent in (("", "absent"), ("another", -1)):
        node.process = process
        near.look_again()
        await until(lambda: near.states() == [True] and near.router.serves("chat"))
        body = {"model": "chat", "messages": [], "logprobs": True, "keep_alive": "-1"}
        async with near.http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
        assert json.loads((await node.calls.get()).body).get("keep_alive", "absent") == sent


async def test_the_weight_of_a_node_comes_from_its_settings(place: Place) -> None:
    near = await place.near(await place.node(LOADED), weight=0.5)
    (instance,) = near.router.instances()
    assert instance.weight == Weight(0.5, "set")


async def test_the_event_loop_never_works_long_on_the_lists_of_nodes(place: Place) -> None:
    """Work is counted in calls and returns between two turns of the loop, in its thread alone."""
    many = [[f"{node}-{model}" for model in range(512)] for node in range(10)]
    nodes = [
        await place.node(
            *({"id": name, "aliases": [f"{name}-{alias}" for alias in range(3)]} for name in names)
        )
        for names in many
    ]
    near = NodesProxy(*(configured_node(f"n{at}", node.url) for at, node in enumerate(nodes)))
    calls = last = longest = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    def turn() -> None:
        nonlocal last, longest
        longest, last = max(longest, calls - last), calls
        loop.call_soon(turn)

    loop = asyncio.get_running_loop()
    async with near.running():
        loop.call_soon(turn)
        sys.setprofile(count)
        try:
            await until(lambda: near.nodes.names().get("9-511-2") is not None)
        finally:
            sys.setprofile(None)
    assert len(near.nodes.models()) == 5120
    assert longest < 1_500_000  # 500 million when all names were compared with all
