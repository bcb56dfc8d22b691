"""Two keys with the same opening on a whole daemon: a deletion by one leaves the other's caches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.corral_cli import CorralCli, until
from support.engine import KEY, running

from supervisor.builds.discover import Engine

SETTINGS = """
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "{keys}"
share_caches = "{share}"
[models.chat]
path = "{model}"
flags = {{ parallel = 2, ctx-size = 8192, threads = 1 }}
"""
OPENING = [{"role": "user", "content": "the river and the garden and the window " * 30}]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(
    corral: CorralCli, key: str, messages: list[dict[str, str]], request_id: str = "same"
) -> tuple[list[dict[str, str]], int]:
    """Return the conversation with its next turn, and how much of the prompt the engine found."""
    body: dict[str, Any] = {"model": "chat", "messages": messages, "max_tokens": 4}
    headers = {**bearer(key), "X-Request-Id": request_id}
    url = f"{corral.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=60).json()
    said = answer["choices"][0]["message"]["content"]
    then = [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    return [*messages, *then], answer["timings"]["cache_n"]


def delete(corral: CorralCli, key: str) -> httpx.Response:
    url = f"{corral.url}/corral/v1/requests/same/conversation"
    return httpx.delete(url, headers=bearer(key), timeout=30)


@pytest.mark.parametrize("share", ["all", "key"])
def test_a_key_deletes_its_own_conversation_alone(
    corral: CorralCli, tiny_model: Path, share: str
) -> None:
    keys = corral.root / "config" / "keys.toml"
    corral.configure(SETTINGS.format(keys=keys, model=tiny_model, share=share))
    anna, ben, cora = (corral.data("key", "add", name)["key"] for name in ("anna", "ben", "cora"))
    corral.ok("start")
    annas, _ = ask(corral, anna, OPENING)
    _, bens_found = ask(corral, ben, OPENING)
    assert (bens_found > 100) == (share == "all")
    corral.ok("slots", "save")
    saved = {slot["name"] for slot in corral.data("slots", "list")}
    assert len(saved) == 2
    until(lambda: delete(corral, ben).status_code == 200)
    left = {slot["name"] for slot in corral.data("slots", "list")}
    assert len(left) == 1
    assert left < saved
    assert delete(corral, cora).status_code == 404  # it never had a request of that id
    annas, found = ask(corral, anna, annas)
    assert found > 100
    corral.ok("stop")
    corral.ok("start")
    _, bens_found = ask(corral, ben, annas)  # it has read all of her conversation
    assert (bens_found > 100) == (share == "all")
    _, found = ask(corral, anna, annas)
    assert found > 100


VECTORS = """
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "{keys}"
share_caches = "{share}"
[models.vectors]
path = "{model}"
flags = {{ parallel = 2, ctx-size = 4096, threads = 1, embedding = true, pooling = "last" }}
"""


@pytest.mark.parametrize("share", ["all", "key"])
def test_a_text_is_computed_for_each_key_where_keys_share_nothing(
    corral: CorralCli, engine: Engine, tiny_model: Path, share: str
) -> None:
    """With the pooling `last`, build 10434 reuses the cache of a text, and 11434 does not."""
    keys = corral.root / "config" / "keys.toml"
    corral.configure(VECTORS.format(keys=keys, model=tiny_model, share=share))
    owners = [corral.data("key", "add", name)["key"] for name in ("anna", "ben", "cora")]
    corral.ok("start")
    with httpx.Client(base_url=corral.url, timeout=60) as client:
        cached = cached_tokens(client, owners)
    flags = ("-np", "2", "-c", "4096", "-t", "1", "--embedding", "--pooling", "last", "--metrics")
    with running(engine, tiny_model, *flags, "--no-kv-unified", "-sps", "0") as socket:
        transport = httpx.HTTPTransport(uds=str(socket))
        with httpx.Client(base_url="http://engine", transport=transport, timeout=60) as client:
            reused = cached_tokens(client, [KEY] * len(owners))
    assert (cached > 50) == (share == "all" and reused > 50)


def cached_tokens(client: httpx.Client, keys: Sequence[str]) -> int:
    """Ask for the same vector with each key; return the tokens that the engine found cached."""
    body = {"model": "vectors", "input": "the river and the garden " * 20}
    for key in keys:
        asked = client.post("/v1/embeddings", json=body, headers=bearer(key))
        assert asked.status_code == 200
    page = client.get("/metrics", headers=bearer(keys[0])).text
    found = re.search(r"^llamacpp:prompt_tokens_cached_total(?:\{.*\})? (\d+)", page, re.MULTILINE)
    assert found
    return int(found[1])
