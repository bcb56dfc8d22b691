"""Another machine in the test's own process, and a proxy that knows some of them."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from support.proxy_harness import FakeLoader
from support.upstream import Call, Fake, Script, say_ok

from proxy.app import App, Backend
from proxy.auth.access import PREFIXES
from proxy.endpoints.prometheus import Metrics
from proxy.errors import UpstreamConnectFailed
from proxy.nodes.configured import ConfiguredNode, NodeTimes
from proxy.nodes.nodes import Nodes
from proxy.nodes.settings import NodeSettings
from proxy.router.router import Router
from proxy.server import Server
from proxy.settings import ProxySettings

QUICK = NodeTimes(
    poll_s=0.05,
    retry_first_s=0.01,
    retry_max_s=0.02,
    ttl_min_s=0.01,
    confirm_s=0.01,
    dns_timeout_s=0.2,
    digest_s=0.001,
    idle_digest_s=0.001,
    loading_poll_s=0.01,
    waiting_look_s=0.01,
    ask_s=0.5,
)
SETTINGS = ProxySettings(listen="127.0.0.1:0", connect_timeout_s=5, upstream_read_timeout_s=20)


class FakeNode(Fake):
    """Listens on a port of loopback and lists `entries` as its models; that is no call."""

    def __init__(
        self,
        *entries: dict[str, Any],
        script: Script = say_ok,
        key: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__("node", Path("/nowhere"), script)
        self._key = key
        self._host = host
        self.process = ""
        self.is_draining = False
        self.failures = 0  # the number of next polls that fail
        self.entries = list(entries)
        self.slots: int | None = None
        self.looks: list[Call] = []
        self.port = port
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen; after a `stop`, on the same port."""
        server = await asyncio.start_server(self._serve, self._host, self.port, ssl=tls)
        self._server = server
        self.port = server.sockets[0].getsockname()[1]

    async def _answer(self, call: Call) -> None:
        path = call.line.split()[1].partition("?")[0]
        await self.may_answer.wait()
        if self._key and call.headers.get("Authorization") != f"Bearer {self._key}":
            await call.head("Content-Length: 0", status="401 Unauthorized")
        elif self.is_draining:
            status = "503 Service Unavailable"
            await call.head("Content-Length: 0", "X-Corral-Draining: 1", status=status)
        elif path.endswith("/v1/models") and self.failures:
            self.failures -= 1
            await call.head("Content-Length: 0", status="500 Internal Server Error")
        elif path.endswith("/v1/models"):
            self.looks.append(call)
            process = [f"X-Corral-Process: {self.process}"] if self.process else []
            await _say(call, {"object": "list", "data": self.entries}, *process)
        elif path.endswith("/slots"):
            self.looks.append(call)
            await _say(call, [{"id": 0}] * self.slots if self.slots else None)
        elif path.endswith(PREFIXES):
            await _say(call, None)  # as a version without digests does
        else:
            await super()._answer(call)


async def _say(call: Call, page: object, *fields: str) -> None:
    body = json.dumps(page).encode()
    status = "404 Not Found" if page is None else "200 OK"
    length = f"Content-Length: {len(body)}"
    await call.head("Content-Type: application/json", length, *fields, status=status)
    await call.send(body)


def configured_node(name: str, url: str, *, api_key: str = "", **options: Any) -> ConfiguredNode:
    return ConfiguredNode(name, NodeSettings(url=url, **options), api_key)


class NodesProxy:
    """A proxy that knows some nodes, and has no model of its own until one is put into `here`."""

    http: aiohttp.ClientSession

    def __init__(self, *nodes: ConfiguredNode, settings: ProxySettings = SETTINGS) -> None:
        self.emitted: list[tuple[str, dict[str, Any]]] = []
        metrics = Metrics(settings, lambda name, fields: self._hear(name, **fields))
        self.router = Router(settings, metrics.emit)
        self.here = FakeLoader(self.router)
        self.here.model_infos = []
        self.nodes = Nodes(nodes, self.router, self.here, settings, self._hear, QUICK)
        backend = Backend(loader=self.nodes, process=self.nodes.process)
        self.server = Server(App(self.router, settings, metrics, backend))

    def _hear(self, name: str, /, **fields: object) -> None:
        self.emitted.append((name, fields))

    def events(self, *names: str) -> list[str]:
        """Return the events of these names, in order."""
        return [name for name, _ in self.emitted if name in names]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[NodesProxy]:
        """Run it, and its watch over the nodes."""
        await self.server.start()
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.nodes.serve()), loop.create_task(self.router.run())]
        try:
            async with aiohttp.ClientSession(self.server.url) as self.http:
                yield self
        finally:
            await self.server.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def look_again(self) -> None:
        """Have every node asked again now, and given nothing until it answers."""
        for instance in self.router.instances():
            self.nodes.mark_suspect(
                instance.upstream, UpstreamConnectFailed(instance.upstream.name, "is doubted")
            )

    def states(self) -> list[bool]:
        return [facts.state == "up" for facts in self.nodes.stats()]

    async def ask(self, model: str = "chat", **headers: str) -> tuple[int, str | None, Any]:
        """Return status, instance and answer."""
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        async with self.http.post(
            "/v1/chat/completions", json={**body, "logprobs": True}, headers=headers
        ) as response:
            answer = await response.json(content_type=None)
            return response.status, response.headers.get("X-Corral-Instance"), answer

    async def models(self, **headers: str) -> dict[str, Any]:
        async with self.http.get("/v1/models", headers=headers) as response:
            return {entry["id"]: entry for entry in (await response.json())["data"]}
