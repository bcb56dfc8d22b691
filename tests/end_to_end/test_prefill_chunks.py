"""A long prompt beside a running stream, on the real engine with `prefer_pure_decode`."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import CorralCli

WORDS = ("river", "stone", "cloud", "window", "garden", "paper", "silver", "engine", "music")
SETTINGS = """
[models.chat]
path = "{path}"
flags = {{ threads = 1, threads-batch = 1 }}
[models.chat.batching]
max_sbatch_sequences = 3
max_context_length = 2048
prefer_pure_decode = true
"""


def open_answer(corral: CorralCli, path: str, **members: Any) -> Any:
    body = {"model": "chat", "temperature": 0, **members}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(corral.url + path, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60)


@contextmanager
def a_stream(corral: CorralCli) -> Iterator[None]:
    """Have a request decode for the length of the block."""
    members = {"prompt": "a story", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with open_answer(corral, "/v1/completions", **members) as response:
        assert response.readline().startswith(b"data: ")
        yield


def figures(corral: CorralCli, path: str, members: dict[str, Any]) -> tuple[str, int, int]:
    """Return the text of an answer, and its cached and computed prompt tokens."""
    with open_answer(corral, path, max_tokens=8, **members) as response:
        answer = json.load(response)
    choice, timings = answer["choices"][0], answer["timings"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, timings["cache_n"], timings["prompt_n"]


def prompt(path: str, seed: int) -> dict[str, Any]:
    words = random.Random(seed).choices(WORDS, k=240)  # noqa: S311 (a text)
    text = " ".join(words)
    if path == "/v1/completions":
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_chunks_change_no_answer(corral: CorralCli, tiny_model: Path, path: str) -> None:
    """seed 001: BatchConfig.prefer_pure_decode."""
    corral.configure(SETTINGS.format(path=tiny_model))
    corral.ok("start")
    members = prompt(path, 1)
    with a_stream(corral):
        text, cached, computed = figures(corral, path, members)
    assert cached > 2 * computed > 0  # the tokens that the chunks computed are found
    whole, no_cache, all_tokens = figures(corral, path, {**members, "cache_prompt": False})
    assert (no_cache, all_tokens) == (0, cached + computed)
    assert text == whole
