"""A daemon loads a model for another one, as far as its memory allows."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corral_cli import CorralCli, until
from support.fork_server import ForkServer

MODELS = """
[supervisor]
memory_budget = "60MiB"

[models.one]
path = "{path}"
preload = false
flags = {{ parallel = 1, threads = 1 }}

[models.two]
path = "{other}"
preload = false
flags = {{ parallel = 1, threads = 1 }}
"""


@pytest.fixture
def front(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[CorralCli]:
    front = CorralCli(tmp_path_factory.mktemp("f"), fork_server)
    yield front
    front.end()


def ask(corral: CorralCli, model: str) -> tuple[int, str]:
    """Return status, and the instance that answered or the error."""
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(
        f"{corral.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers["X-Corral-Instance"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["message"]


def test_a_node_loads_models_that_fit(
    corral: CorralCli, front: CorralCli, tiny_model: Path, tmp_path: Path
) -> None:
    other = shutil.copy(tiny_model, tmp_path / "other.gguf")
    consent = '[proxy]\nlisten = "127.0.0.1:0"\nload_for_others = "idle"\n'
    corral.configure(consent + MODELS.format(path=tiny_model, other=other))
    corral.ok("start")
    front.configure(f"[nodes.far]\nurl = '{corral.url}'\nload = 'idle'\n")
    front.ok("start")
    until(lambda: [node.state for node in front.status().nodes] == ["up"])
    assert ask(front, "one") == (200, "far/one")
    status, message = ask(front, "two")
    assert status == 503
    assert message.endswith("too little memory is free for it")
    assert corral.model_states() == {"one": "loaded", "two": "unloaded"}
