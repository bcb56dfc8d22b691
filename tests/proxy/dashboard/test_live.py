"""The live stream: a snapshot, changes, events, a log; without a listener it costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import aiohttp
import orjson
from support.dashboard_client import LIVE as URL
from support.dashboard_client import live, origin, signed_in
from support.proxy_harness import CHAT, ProxyHarness
from support.requests import ask
from support.upstream import Call

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.cache.holders import SavedPrompt
from proxy.router.lease import Completion
from proxy.upstream.upstream import Timings

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


@dataclass(frozen=True)
class Event:
    name: str
    fields: Mapping[str, object] = field(default_factory=dict)
    level: str = "info"
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)


async def generates(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(TOKEN)
    await call.chunk(TOKEN)
    await call.until_left()


async def test_a_request_appears_in_its_slot_and_leaves(proxy: ProxyHarness) -> None:
    await proxy.fake(generates)
    await signed_in(proxy)
    async with live(proxy) as stream, asyncio.TaskGroup() as group:
        first = await stream.until("snapshot")
        assert first["state"]["server"]["version"] == "1.2.3"
        assert first["state"]["models"]["chat"]["actions"] == ["unload", "restart", "warm"]
        assert first["state"]["instances"]["chat.1"]["pid"] == 42
        assert first["history"]["interval_s"] == 1
        assert "null" not in orjson.dumps(first["state"]).decode()

        async def ask() -> None:
            body, headers = {**CHAT, "stream": True}, {"X-Request-Id": "a"}
            with suppress(aiohttp.ClientError):
                async with proxy.http.post(
                    "/v1/chat/completions", json=body, headers=headers
                ) as response:
                    await response.read()

        task = group.create_task(ask())
        while not stream.state["requests"].get("a", {}).get("decoded_tokens"):
            await stream.next()
        slots = stream.state["instances"]["chat.1"]["slots"].values()
        assert [slot["request"] for slot in slots if slot["phase"] == "decode"] == ["a"]
        path = "/corral/v1/requests/a/cancel"
        async with proxy.http.post(path, json={}, headers=origin(proxy)) as response:
            assert response.status == 200
        await task
        while "a" in stream.state["requests"]:
            await stream.next()


async def test_events_are_numbered_and_the_latest_are_repeated(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    (take,) = proxy.dashboard.takes
    for number in range(102):
        take(Event("node.up", {"node": number, "reason": None}))
        take(Event("request.finished"))
    take(Event("instance.load_progress"))
    async with live(proxy) as stream:
        assert (await stream.until("event"))["seq"] == 5
        while (event := await stream.until("event"))["seq"] != 203:
            pass
        assert event["fields"] == {"node": 101}
        take(Event("node.down", level="warning"))
        while (event := await stream.until("event"))["seq"] != 205:
            assert event["name"] == "request.finished"
        assert (event["name"], event["level"]) == ("node.down", "warning")


async def test_many_requests_displace_no_other_events(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    (take,) = proxy.dashboard.takes
    take(Event("node.up"))
    for _ in range(200):
        take(Event("request.finished"))
    async with live(proxy) as stream:
        first, second = await stream.until("event"), await stream.until("event")
    assert [(event["seq"], event["name"]) for event in (first, second)] == [
        (1, "node.up"),
        (102, "request.finished"),
    ]


async def test_a_state_changes_by_patches(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    async with live(proxy) as stream:
        await stream.until("snapshot")
        one = proxy.dashboard.processes[0]
        error = {"code": "killed", "message": "it was killed"}
        proxy.dashboard.processes = [replace(one, state="backoff", pid=None, error=error)]
        while stream.state["instances"]["chat.1"]["state"] != "backoff":
            await stream.next()
        assert "pid" not in stream.state["instances"]["chat.1"]
        assert stream.state["instances"]["chat.1"]["error"]["code"] == "killed"


async def test_a_log_is_followed_where_it_is_asked_for(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    proxy.dashboard.log = ["one", "two", "three"]
    async with live(proxy, logs="daemon", lines="2") as stream:
        assert await stream.until("log") == {"source": "daemon", "lines": ["two", "three"]}
    for query, status in (({"logs": "../keys"}, 404), ({"logs": "daemon", "lines": "-1"}, 400)):
        async with proxy.http.get(URL, params=query) as response:
            assert response.status == status
    async with proxy.http.get("/corral/v1/logs/daemon", params={"lines": "1"}) as response:
        assert await response.json() == {"source": "daemon", "lines": ["three"]}


async def test_it_ends_with_its_session_and_with_the_server(proxy: ProxyHarness) -> None:
    async with proxy.http.get(URL) as response:
        assert response.status == 401
    await signed_in(proxy)
    async with live(proxy) as stream:
        async with proxy.http.post(
            "/corral/v1/session/end", json={}, headers=origin(proxy)
        ) as response:
            assert response.status == 200
        assert await stream.until("end") == {"reason": "session"}
    await signed_in(proxy)
    async with live(proxy) as stream:
        await stream.until("snapshot")
        async with asyncio.TaskGroup() as group:
            group.create_task(proxy.server.close())
            assert await stream.until("end") == {"reason": "stopping"}


async def test_listeners_are_bounded(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    async with asyncio.TaskGroup() as group:
        opened = asyncio.Semaphore(0)
        done = asyncio.Event()

        async def listen() -> None:
            async with live(proxy):
                opened.release()
                await done.wait()

        for _ in range(32):
            group.create_task(listen())
        for _ in range(32):
            await opened.acquire()
        async with proxy.http.get(URL) as response:
            assert response.status == 429
        done.set()


async def test_commands_are_for_admins_and_models_of_this_machine(proxy: ProxyHarness) -> None:
    path = "/corral/v1/models/chat/restart"
    async with proxy.http.post(path, json={}, headers=origin(proxy)) as response:
        assert (await response.json())["error"]["code"] == "session_required"
    await signed_in(proxy)
    for name, status in (("chat", 200), ("none", 404)):
        path = f"/corral/v1/models/{name}/restart"
        async with proxy.http.post(path, json={}, headers=origin(proxy)) as response:
            assert response.status == status
        async with proxy.http.get(path) as response:
            assert response.status == 405
    assert proxy.dashboard.commands == [("restart", "chat")]
    async with proxy.http.get("/corral/v1/clients") as response:
        assert (await response.json())["models"] == ["chat"]


async def test_what_came_from_disk_is_among_the_caches(proxy: ProxyHarness) -> None:
    await proxy.fake()
    await signed_in(proxy)
    async with proxy.router.lease(ask("hello")) as lease:
        file = SlotFile("a", "key", 300, 1000, ConversationFingerprint())
        lease.restored = SavedPrompt(file, 300, 300, 1, is_whole=True)
        proxy.router.finish(lease, Completion(Timings(300, 20, 10.0, 4, 40.0)))
    async with live(proxy) as stream:
        first = await stream.until("snapshot")
        caches = first["state"]["caches"]["chat"]
        assert (caches["disk_tokens"], caches["computed_tokens"]) == (300, 20)
        assert caches["slot_tokens"] == caches["host_cache_tokens"] == 0
        assert caches["saved_s"] >= 0
