"""Clients of Ollama's API download, use and delete a model of a hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import ollama
import pytest
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.hub import FakeHub, Refusal

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


def test_a_model_is_pulled_used_and_deleted_by_ollamas_client(
    corral: CorralCli, hub: FakeHub
) -> None:
    corral.configure(SETTINGS)
    corral.serve(until_ready=False)
    until(corral.is_running)
    hub.api_refusals = [Refusal(403, {"x-error-code": "GatedRepo"})]
    with closing(ollama.Client(corral.url, timeout=PATIENCE_S)) as client:
        pull_use_and_delete(client)
    assert list((corral.root / "hf").rglob("*.gguf")) == []


def pull_use_and_delete(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="gated"):
        list(client.pull(NAME, stream=True))
    steps = list(client.pull(NAME, stream=True))
    assert (steps[0].status, steps[-1].status) == ("pulling manifest", "success")
    transfers = [step for step in steps if step.total]
    assert transfers[-1].completed == transfers[-1].total
    message = {"role": "user", "content": "hello"}
    answer = client.chat(NAME, [message], options={"num_predict": 4})
    assert answer.eval_count == 4
    with pytest.raises(ollama.ResponseError, match=r"\[models\.own\]") as kept:
        client.delete("own")
    assert kept.value.status_code == 501
    assert client.delete(NAME).status == "success"
    with pytest.raises(ollama.ResponseError) as gone:
        client.chat(NAME, [message])
    assert gone.value.status_code == 404
