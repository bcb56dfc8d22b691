"""Conversations move between two nodes of a front that share no directory."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.fork_server import ForkServer

from supervisor.rpc.address import free_port

KEY = "corral-machines-1"
KEYS = f'[keys.machines]\nkey = "{KEY}"\nadmin = true\n'
MODEL = """
[models.chat]
path = "{path}"
flags = {{ parallel = 1, threads = 1, ctx-size = 4096, cache-ram = 0 }}
"""
NODE = '[nodes.{name}]\nurl = "{url}"\nkey_file = "front.key"\n'
WORDS = ["river", "stone", "ship", "moon", "salt", "green", "under", "seven", "walks", "light"]


@pytest.fixture
def machines(
    tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer, tiny_model: Path
) -> Iterator[tuple[CorralCli, CorralCli, CorralCli]]:
    """A front without models, and two nodes that know each other."""
    front, one, two = (CorralCli(tmp_path_factory.mktemp("x"), fork_server) for _ in range(3))
    urls = {corral: f"http://127.0.0.1:{free_port()}" for corral in range(2)}
    model = MODEL.format(path=tiny_model)
    with ExitStack() as ends:
        for number, corral in enumerate((one, two, front)):
            ends.callback(corral.end)
            listen = urls.get(number, "http://127.0.0.1:0").removeprefix("http://")
            others = [
                NODE.format(name=f"n{at}", url=url) for at, url in urls.items() if at != number
            ]
            proxy = f'[proxy]\nlisten = "{listen}"\napi_keys_file = "keys.toml"\n'
            corral.configure(proxy + "".join(others) + (model if corral is not front else ""))
            for name, text in (("keys.toml", KEYS), ("front.key", KEY)):
                path = corral.root / "config" / name
                path.touch(0o600)
                path.write_text(text, "utf-8")
        for corral in (one, two, front):
            corral.ok("start")
        until(lambda: serving(front) == [["chat"], ["chat"]])
        until(lambda: serving(one) == serving(two) == [["chat"]])
        yield front, one, two


def serving(corral: CorralCli) -> list[list[str]]:
    """Return the models of each node that is up."""
    return [node.models for node in corral.status().nodes if node.state == "up"]


def ask(
    corral: CorralCli, messages: list[dict[str, str]], **headers: str
) -> tuple[str, dict[str, Any]]:
    """Return the instance that answers a chat, and the engine's timings; add the answer."""
    body = {"model": "chat", "messages": messages, "max_tokens": 4, "temperature": 0}
    with send(corral, "/v1/chat/completions", headers, json.dumps(body).encode()) as response:
        answer = json.load(response)
    messages.append(answer["choices"][0]["message"])
    return response.headers["X-Corral-Instance"], answer["timings"]


def send(corral: CorralCli, path: str, headers: dict[str, str], body: bytes | None = None) -> Any:
    fields = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(corral.url + path, body, fields)
    return urllib.request.urlopen(request, timeout=PATIENCE_S)


def test_a_conversation_moves_to_another_machine_with_its_slot_file(
    machines: tuple[CorralCli, CorralCli, CorralCli],
) -> None:
    front, one, two = machines
    messages = [{"role": "user", "content": " ".join(WORDS * 10)}]
    name, first = ask(front, messages)
    owner, other = (one, two) if name == "n0/chat" else (two, one)
    owner.ok("stop")  # it hands over what it has
    messages.append({"role": "user", "content": " ".join(reversed(WORDS * 20))})
    _, second = ask(front, messages)
    assert second["cache_n"] >= first["prompt_n"]

    owner.ok("start")  # it has its file of the first turn, and a front says who has the second
    until(lambda: serving(owner) == [["chat"]])
    other.ok("slots", "save")
    with send(other, "/v1/models", {"X-Corral-Hop": "1"}) as response:
        holder = response.headers["X-Corral-Process"]
    messages.append({"role": "user", "content": "and then?"})
    told = {"X-Corral-Hop": "1", "X-Corral-Holder": holder}
    _, third = ask(owner, messages, **told)
    assert third["cache_n"] >= second["cache_n"] + second["prompt_n"]
    (taken,) = owner.events("slots.taken")
    assert taken["tokens"] >= third["cache_n"]
