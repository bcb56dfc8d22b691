"""A prefix that conversations share is saved once, and read where it is not."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from support import tiny_gguf, tiny_hybrid
from support.corral_cli import CorralCli, until

LONG = "B is kind and looks at the moon, at the river and at the stone" * 24
SETTINGS = """
[models.chat]
path = "{model}"
replicas = {replicas}
[models.chat.flags]
parallel = 2
ctx-size = 8192
threads = 1
"""


# By page: how it has the system prompt and the messages, and how an answer tells its tokens.
PAGES: dict[str, tuple[str, str, str]] = {
    "/v1/messages": ("system", "messages", "max_tokens"),
    "/v1/responses": ("instructions", "input", "max_output_tokens"),
}


def begin(corral: CorralCli, asked: str, page: str = "/v1/chat/completions") -> int:
    """Begin a conversation; return the prompt tokens that the engine computed."""
    question: dict[str, Any] = {"role": "user", "content": asked}
    if page in PAGES:
        system, messages, limit = PAGES[page]
        body = {system: LONG, messages: [question], limit: 2}
    else:
        body = {"messages": [{"role": "system", "content": LONG}, question], "max_tokens": 2}
    request = urllib.request.Request(
        f"{corral.url}{page}",
        json.dumps({"model": "chat", "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        match json.load(response):
            case {"timings": {"prompt_n": int(computed)}}:
                return computed
            case {
                "usage": {"input_tokens_details": {"cached_tokens": found}, "input_tokens": all_}
            }:
                return int(all_) - int(found)
            case {"usage": {"input_tokens": int(computed)}}:
                return computed
    raise AssertionError


def tiers(corral: CorralCli) -> dict[str, str]:
    """Return where the first prompt of each instance was found."""
    found: dict[str, str] = {}
    for event in corral.events("request.finished"):
        found.setdefault(event["instance"], event["cache_tier"])
    return found


def test_a_shared_prefix_is_computed_on_one_replica_and_restored_on_others(
    corral: CorralCli, slow_model: Path
) -> None:
    # Its prompts take so long that a file is worth reading, however slow the disk is.
    corral.configure(SETTINGS.format(model=slow_model, replicas=1))
    corral.ok("start")
    questions = (f"question {at}" for at in count())
    for asked in islice(questions, 3):
        begin(corral, asked)
    until(lambda: corral.events("prefix.saved"))
    (saved,) = corral.events("prefix.saved")
    assert saved["cached"] > 0.9 * saved["tokens"]
    until(lambda: saved["tokens"] in [slot["tokens"] for slot in corral.data("slots", "list")])
    corral.configure(SETTINGS.format(model=slow_model, replicas=2))
    assert corral.data("reload")["added"] == ["chat.1"]
    (filled,) = corral.events("slots.restored")
    assert (filled["instance"], filled["tokens"]) == ("chat.1", saved["tokens"])
    until(lambda: begin(corral, next(questions)) and len(tiers(corral)) == 2)
    assert tiers(corral)["chat.1"] == "disk"


@pytest.mark.parametrize("page", ["/v1/chat/completions", *PAGES])
def test_of_two_requests_at_once_one_computes_the_common_beginning(
    corral: CorralCli, slow_model: Path, page: str
) -> None:
    corral.configure(SETTINGS.format(model=slow_model, replicas=2))
    corral.ok("start")
    with ThreadPoolExecutor() as clients:
        asked = ("one", "another")
        computed = list(clients.map(lambda asked: begin(corral, asked, page), asked))
    until(lambda: len(corral.events("request.finished")) == 2)
    finished = corral.events("request.finished")
    first, second = sorted(finished, key=lambda event: -event["prompt_tokens"])
    assert first["cached_tokens"] < 0.1 * first["prompt_tokens"]
    beginning = first["prompt_tokens"] - second["prompt_tokens"]
    assert second["prompt_tokens"] < 0.1 * beginning
    assert second["cache_tier"] == "disk"
    # The first replica found in its slot the prefix that it had computed.
    assert all(tokens < 0.1 * beginning for tokens in computed)
    saved = [file["tokens"] for file in corral.data("slots", "list")]
    assert any(0.9 * beginning < tokens < first["prompt_tokens"] for tokens in saved)
    told = corral.data("explain", second["request"])
    assert "for a request that computed the same beginning" in told["sentence"]


@pytest.mark.parametrize("page", ["/v1/chat/completions", *PAGES])
@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_what_an_engine_uses_only_as_a_whole_is_saved_without_the_question(
    corral: CorralCli, tmp_path: Path, kind: str, page: str
) -> None:
    model = tmp_path / "model.gguf"
    if kind == "hybrid":
        tiny_hybrid.make(model, mode="cycle", ctx=8192)
    else:
        tiny_gguf.make(model, mode="cycle", layers=6, window=64, ctx=8192)
    corral.configure(SETTINGS.format(model=model, replicas=2))
    corral.ok("start")
    # Before its first answer an engine is taken for slow, so the file is worth its time.
    begin(corral, "one", page)
    until(lambda: corral.data("slots", "list"))
    beginning = min(file["tokens"] for file in corral.data("slots", "list"))
    begin(corral, "another", page)
    until(lambda: len(corral.events("request.finished")) == 2)
    first, second = corral.events("request.finished")
    assert first["instance"] != second["instance"]
    assert second["cache_tier"] == "disk"
    assert second["cached_tokens"] == beginning > 0.9 * first["prompt_tokens"]
