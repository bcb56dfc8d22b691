"""Embeddings and ranks are the same alone, in a list and beside other clients."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import tiny_bert
from support.corral_cli import CorralCli

CONFIG = """
[supervisor]
persist_slots = false

[models.mean]
path = "{decoder}"
flags = {{ embeddings = true, pooling = "mean" }}

[models.last]
path = "{decoder}"
args = ["--embeddings", "--pooling", "last"]

[models.cls]
path = "{cls}"

[models.ranker]
path = "{rank}"
"""
TEXTS = [
    "the user",
    "a hello in there on the other side " * 5,
    "x",
    "of the assistant " * 20,
    "an error he has",
    "user " * 60,
]
SAME = 1e-5


def ask(url: str, page: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{url}{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def vectors(url: str, model: str, texts: Sequence[str]) -> list[list[float]]:
    found = ask(url, "/v1/embeddings", model=model, input=list(texts))["data"]
    return [entry["embedding"] for entry in sorted(found, key=lambda entry: entry["index"])]


def difference(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    pairs = (pair for a, b in zip(some, others, strict=True) for pair in zip(a, b, strict=True))
    return max(abs(a - b) for a, b in pairs)


@pytest.fixture
def url(corral: CorralCli, tiny_model: Path, tmp_path: Path) -> str:
    cls = tiny_bert.make(tmp_path / "cls.gguf", "cls")
    rank = tiny_bert.make(tmp_path / "rank.gguf", "rank")
    corral.configure(CONFIG.format(decoder=tiny_model, cls=cls, rank=rank))
    corral.ok("start")
    return corral.url


def test_a_vector_is_the_same_alone_in_a_list_and_beside_others(url: str) -> None:
    for model in ("mean", "last", "cls"):
        alone = [vectors(url, model, [text])[0] for text in TEXTS]
        assert difference(alone, vectors(url, model, TEXTS)) < SAME, model
        with ThreadPoolExecutor(len(TEXTS)) as clients:
            beside = list(clients.map(lambda text, m=model: vectors(url, m, [text])[0], TEXTS))
        assert difference(alone, beside) < SAME, model


def test_a_rank_is_the_same_alone_and_in_a_list(url: str) -> None:
    def scores(documents: list[str]) -> list[float]:
        found = ask(url, "/v1/rerank", model="ranker", query="the user", documents=documents)
        listed = sorted(found["results"], key=lambda result: result["index"])
        return [entry["relevance_score"] for entry in listed]

    texts = [text[:40] for text in TEXTS]
    assert difference([scores(texts)], [[scores([text])[0] for text in texts]]) < SAME


def test_inputs_longer_than_the_context_are_rejected(url: str) -> None:
    for model, tokens in (("mean", 2048), ("cls", 512)):
        assert len(vectors(url, model, [[10] * tokens])[0]) == 64  # type: ignore[list-item]
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, "/v1/embeddings", model=model, input=[[10] * (tokens + 1)])
        assert refused.value.code == 400
        error = json.load(refused.value)["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(tokens + 1) in error["message"]


def test_a_model_for_embeddings_by_its_flag_still_chats(url: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = ask(url, "/v1/chat/completions", model="mean", messages=messages, max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_model_that_generates_no_text_refuses_a_chat(url: str, *, is_stream: bool) -> None:
    messages = [{"role": "user", "content": "hello"}]
    requests: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": "hello"},
        "/v1/messages": {"messages": messages, "max_tokens": 3},
        "/v1/responses": {"input": "hello"},
    }
    for model in ("cls", "ranker"):
        for page, body in requests.items():
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(url, page, model=model, stream=is_stream, **body)
            error = json.load(refused.value)["error"]
            assert (refused.value.code, error["type"]) == (400, "invalid_request_error"), page
            assert "/v1/embeddings" in error["message"]
