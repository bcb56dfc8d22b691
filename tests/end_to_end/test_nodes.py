"""Nodes: two other daemons on loopback, one of them killed under load."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.fork_server import ForkServer

MODEL = "[models.chat]\npath = '{path}'\nflags = {{ parallel = 2, threads = 1, ctx-size = 8192 }}\n"
LONG = " ".join(["the stone in the river"] * 40)


class NodeSetup:
    """Two nodes that serve `chat`, and one in front of them that has no model of its own."""

    def __init__(self, homes: list[Path], fork_server: ForkServer) -> None:
        self.one, self.two, self.front = (CorralCli(home, fork_server) for home in homes)

    def begin(self, model: Path) -> None:
        for node in (self.one, self.two):
            listen = f"[proxy]\nlisten = '127.0.0.1:{free_port()}'\n"
            node.configure(MODEL.format(path=model) + listen)
        self.daemon = self.one.serve()
        self.two.serve()
        self.front.configure(
            f"[nodes.one]\nurl = '{self.one.url}'\n[nodes.two]\nurl = '{self.two.url}/v1'\n"
        )
        self.front.serve(until_ready=False)
        until(self.front.is_running)
        self.url = self.front.url
        until(lambda: self.states() == ["up", "up"])

    def states(self) -> list[str]:
        return [node.state for node in self.front.status().nodes]

    def ask(self, text: str, tokens: int, *, stream: bool = False) -> Any:
        body = {
            "model": "chat",
            "stream": stream,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": text}],
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=PATIENCE_S)

    def whole(self, text: str, tokens: int = 4) -> tuple[str, str]:
        """Return which instance answered, and the finish reason."""
        with self.ask(text, tokens) as response:
            choice = json.load(response)["choices"][0]
            return response.headers["X-Corral-Instance"], choice["finish_reason"]

    def stream(self, text: str) -> Any:
        """Begin a long stream; return it once its first line has arrived."""
        response = self.ask(text, 300, stream=True)
        response.readline()
        return response

    def busy(self, instance: str) -> int:
        """Return how many slots of an instance the front has given to requests."""
        with urllib.request.urlopen(f"{self.url}/corral/v1/slots", timeout=60) as response:
            slots = json.load(response)["slots"]
        return sum(slot["instance"] == instance and slot["state"] != "idle" for slot in slots)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def nodes(
    tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer, slow_model: Path
) -> Iterator[NodeSetup]:
    nodes = NodeSetup([tmp_path_factory.mktemp("n") for _ in range(3)], fork_server)
    with ExitStack() as ends:
        for corral in (nodes.one, nodes.two, nodes.front):
            ends.callback(corral.end)
        nodes.begin(slow_model)
        yield nodes


def rest_of(stream: Any) -> bytes:
    """Read a stream to its end, also where it breaks off."""
    body = b""
    try:
        while line := stream.readline():
            body += line
    except OSError:
        pass
    return body


def test_a_killed_node_loses_no_request_that_can_move(nodes: NodeSetup) -> None:
    streams: dict[str, list[Any]] = {"one/chat": [], "two/chat": []}
    (engine,) = nodes.one.engines()
    instance = ""
    # The last stream is one of the first node: the others may end before that node is killed.
    while not streams["two/chat"] or instance != "one/chat":
        stream = nodes.stream(f"number {sum(map(len, streams.values()))}")
        instance = stream.headers["X-Corral-Instance"]
        if instance:
            streams[instance].append(stream)
        else:  # it waits, because the earlier streams have all slots
            for begun in (*streams["one/chat"], *streams["two/chat"], stream):
                rest_of(begun)
            streams = {"one/chat": [], "two/chat": []}
    engine.suspend()  # its requests are in flight until the node is killed
    with ThreadPoolExecutor(4) as clients:
        calls = [clients.submit(nodes.whole, f"{number} {LONG}") for number in range(4)]
        until(lambda: nodes.busy("one/chat") == 2)
        nodes.daemon.send_signal(signal.SIGKILL)
        nodes.daemon.wait()
        *earlier, in_flight = map(rest_of, streams["one/chat"])
        assert b'"error"' in in_flight
        assert all(b'"error"' in rest or b"data: [DONE]" in rest for rest in earlier)
        for stream in streams["two/chat"]:
            assert b"data: [DONE]" in rest_of(stream)
        assert {call.result() for call in calls} == {("two/chat", "length")}
    until(lambda: nodes.states() == ["down", "up"])
    assert "one" in nodes.front.ok("status")
    nodes.one.serve()
    until(lambda: nodes.states() == ["up", "up"])
    with ThreadPoolExecutor(4) as clients:

        def both_answer() -> bool:
            calls = [clients.submit(nodes.whole, f"again {number}", 50) for number in range(4)]
            return {call.result()[0] for call in calls} == {"one/chat", "two/chat"}

        until(both_answer)
