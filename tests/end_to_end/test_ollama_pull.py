"""Clients of Ollama's API download, use and delete a model of a hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from corral_cli import PATIENCE_S, CorralCli, until
from fakes.hub import FakeHub, Refusal

NAME = "hf.co/org/tiny-GGUF:Q8_0"
SETTINGS = """serve_found = true
[proxy]
listen = "127.0.0.1:0"
ollama = { enabled = true, manage_models = true }
[models.own]
path = "own.gguf"
preload = false
"""


@pytest.fixture
def hub(corral: CorralCli, tiny_model: Path) -> Iterator[FakeHub]:
    files = {"tiny-Q8_0.gguf": tiny_model.read_bytes()}
    with FakeHub({"org/tiny-GGUF": files}).running() as one:
        corral.env |= {"HF_ENDPOINT": one.url, "HF_HOME": str(corral.root / "hf")}
        corral.env |= {"HOME": str(corral.root), "OLLAMA_MODELS": str(corral.root / "none")}
        yield one


def http(corral: CorralCli) -> httpx.Client:
    until(corral.is_running)
    return httpx.Client(base_url=corral.url, timeout=PATIENCE_S)


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_model_is_pulled_used_and_deleted(corral: CorralCli, hub: FakeHub) -> None:
    corral.configure(SETTINGS)
    corral.serve(until_ready=False)
    message = {"role": "user", "content": "hello"}
    hub.api_refusals = [Refusal(403, {"x-error-code": "GatedRepo"})]
    with http(corral) as client:
        gated = lines(client.post("/api/pull", json={"model": NAME}))
        assert "gated" in gated[-1]["error"]
        steps = lines(client.post("/api/pull", json={"model": NAME}))
        assert steps[0] == {"status": "pulling manifest"}
        assert steps[-1] == {"status": "success"}
        transfers = [one for one in steps if "total" in one]
        assert transfers[-1]["completed"] == transfers[-1]["total"]
        body = {"model": NAME, "messages": [message], "stream": False}
        answer = client.post("/api/chat", json={**body, "options": {"num_predict": 4}}).json()
        assert answer["eval_count"] == 4
        own = client.request("DELETE", "/api/delete", json={"model": "own"})
        assert (own.status_code, "[models.own]" in own.json()["error"]) == (501, True)
        deleted = client.request("DELETE", "/api/delete", json={"model": NAME})
        assert deleted.status_code == 200, deleted.text
        assert client.post("/api/chat", json=body).status_code == 404
    assert list((corral.root / "hf").rglob("*.gguf")) == []
