"""OpenAI's own client, unchanged, with files and batches."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types import Batch

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
HELLO: Any = [{"role": "user", "content": "Say hello."}]
BODIES: dict[Endpoint, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "gpt-4o-mini", "messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"model": "smollm2", "prompt": "Hello", "max_tokens": 4},
    "/v1/embeddings": {"model": "embedder", "input": "hello"},
    "/v1/responses": {"model": "smollm2", "input": "Say hello.", "max_output_tokens": 4},
}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def begin(client: openai.OpenAI, endpoint: Endpoint, *bodies: dict[str, Any]) -> Batch:
    lines = [
        json.dumps({"custom_id": f"r{i}", "method": "POST", "url": endpoint, "body": body})
        for i, body in enumerate(bodies)
    ]
    content = "\n".join(lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window="24h",
        metadata={"of": "tests"},
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    while batch.status in {"validating", "in_progress", "finalizing", "cancelling"}:
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_of_each_endpoint_is_computed(client: openai.OpenAI, endpoint: Endpoint) -> None:
    batch = ended(client, begin(client, endpoint, BODIES[endpoint], BODIES[endpoint]))
    assert (batch.status, batch.metadata) == ("completed", {"of": "tests"})
    assert batch.request_counts
    assert batch.request_counts.completed == 2
    assert batch.output_file_id
    found = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    assert [entry["custom_id"] for entry in found] == ["r0", "r1"]
    assert {entry["response"]["status_code"] for entry in found} == {200}
    name = {"/v1/embeddings": "data", "/v1/responses": "output"}.get(endpoint, "choices")
    assert all(entry["response"]["body"][name] for entry in found)


def test_errors_name_the_lines(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, "/v1/completions", {"model": "none"}, {"prompt": "a"}))
    assert batch.status == "failed"
    assert batch.errors
    assert [(entry.line, entry.code) for entry in batch.errors.data or ()] == [
        (1, "model_not_found"),
        (2, "invalid_request"),
    ]


def test_files_are_listed_and_deleted(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("{}\n")
    with path.open("rb") as opened:
        file = client.files.create(
            file=opened,
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
    assert (file.filename, file.bytes, file.expires_at) == (
        path.name,
        3,
        file.created_at + 3600,
    )
    assert file.id in {entry.id for entry in client.files.list(limit=1)}  # over its pages
    assert client.files.retrieve(file.id) == file
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_batches_are_listed_and_cancelled(client: openai.OpenAI) -> None:
    body = BODIES["/v1/completions"] | {"max_tokens": 3000, "ignore_eos": True}
    batch = begin(client, "/v1/completions", *[body] * 8)
    assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
    assert ended(client, client.batches.retrieve(batch.id)).status == "cancelled"
    assert next(iter(client.batches.list(limit=1))).id == batch.id
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
