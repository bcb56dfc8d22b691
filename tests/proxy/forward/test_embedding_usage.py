"""Tokens are read from responses that are passed on, of all choices and of embeddings."""

from __future__ import annotations

import orjson
import pytest

from proxy.forward.assemblers import CompletedResponse, EmbeddingUsage
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Timings

NUMBERS = b'"data":[{"embedding":[' + b",".join([b"0.25"] * 2000) + b"]}]"
USAGE = b'"usage":{"prompt_tokens":273,"total_tokens":273}'


# Source: llama-server, build 10434, has `usage` first for embeddings.
@pytest.mark.parametrize(
    "body", [b'{"model":"m",' + USAGE + b"," + NUMBERS + b"}", b"{" + NUMBERS + b"," + USAGE + b"}"]
)
@pytest.mark.parametrize("size", [7, 100_000])
def test_the_tokens_of_an_embedding_are_read_wherever_they_are(body: bytes, size: int) -> None:
    usage = EmbeddingUsage()
    for at in range(0, len(body), size):
        usage.feed(body[at : at + size])
    assert usage.close(b"").all_choices == Timings(0, 273, 0.0, 0, 0.0)


def test_embeddings_without_figures_have_none() -> None:
    usage = EmbeddingUsage()
    usage.feed(b'[{"index":0,"embedding":[[0.25]]}]')
    assert usage.close(b"").all_choices is None


def timings(decoded: int) -> dict[str, int]:
    return {"cache_n": 1, "prompt_n": 58, "prompt_ms": 5, "predicted_n": decoded, "predicted_ms": 9}


def test_a_prompt_with_several_answers_is_computed_once() -> None:
    response = CompletedResponse(EndpointKind.COMPLETION, is_stream=True)
    for index, decoded in ((0, 10), (1, 7)):
        choice = {"index": index, "text": "", "finish_reason": "length"}
        piece = {"choices": [choice], "timings": timings(decoded)}
        response.feed(b"data: " + orjson.dumps(piece) + b"\n\n")
    completion = response.close(b"")
    assert completion.timings == Timings(1, 58, 5.0, 10, 9.0)
    assert completion.all_choices == Timings(1, 58, 5.0, 17, 18.0)


def test_a_list_of_answers_has_the_tokens_of_all() -> None:
    response = CompletedResponse(EndpointKind.LLAMA_COMPLETION, is_stream=False)
    response.feed(orjson.dumps([{"index": at, "timings": timings(5)} for at in range(3)]))
    assert response.close(b"").all_choices == Timings(1, 58, 5.0, 15, 27.0)
