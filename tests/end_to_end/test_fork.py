"""More answers to one prompt than an instance has slots share one computation of the prompt."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
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


def ask(corral: CorralCli, answers: int, **members: Any) -> bytes:
    messages = [{"role": "user", "content": LONG}]
    body = {"model": "chat", "messages": messages, "max_tokens": 4, "n": answers, "seed": 7}
    request = urllib.request.Request(
        f"{corral.url}/v1/chat/completions",
        json.dumps({**body, **members}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        return error.read()


def joined(stream: bytes) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Return the text of each answer of a stream, and the usage in it."""
    lines = (line.removeprefix(b"data: ") for line in stream.split(b"\n\n"))
    pieces = [json.loads(line) for line in lines if line.startswith(b"{")]
    assert len({piece["id"] for piece in pieces}) == 1
    texts: dict[int, str] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            text = choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts, [piece["usage"] for piece in pieces if piece.get("usage")]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_prompt_of_many_answers_is_computed_once(
    corral: CorralCli, slow_model: Path, replicas: int
) -> None:
    # Its prompts take so long that a file is worth reading, however slow the disk is.
    corral.configure(SETTINGS.format(model=slow_model, replicas=replicas))
    corral.ok("start")
    answer = json.loads(ask(corral, 5))
    until(lambda: corral.events("request.finished"))
    (finished,) = corral.events("request.finished")
    usage, choices = answer["usage"], answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4]
    assert [choice["message"]["content"] for choice in choices] == ["wxyz"] * 5
    assert usage["completion_tokens"] == finished["decoded_tokens"] == 20
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20
    assert finished["prompt_tokens"] < 1.5 * usage["prompt_tokens"]

    stream = ask(corral, 5, stream=True, stream_options={"include_usage": True})
    assert stream.count(b"[DONE]") == 1
    texts, usages = joined(stream)
    assert texts == dict.fromkeys(range(5), "wxyz")
    assert [usage["completion_tokens"] for usage in usages] == [20]


def test_without_slot_files_each_instance_computes_the_prompt_once(
    corral: CorralCli, slow_model: Path
) -> None:
    settings = SETTINGS.format(model=slow_model, replicas=2)
    corral.configure(settings + "[supervisor]\npersist_slots = false\n")
    corral.ok("start")
    answer = json.loads(ask(corral, 3))
    until(lambda: corral.events("request.finished"))
    (finished,) = corral.events("request.finished")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    usage = answer["usage"]
    assert usage["completion_tokens"] == finished["decoded_tokens"] == 12
    assert finished["prompt_tokens"] < 2.1 * usage["prompt_tokens"]


def test_an_error_of_an_answer_is_the_response(corral: CorralCli, slow_model: Path) -> None:
    corral.configure(SETTINGS.format(model=slow_model, replicas=1))
    corral.ok("start")
    for stream in (False, True):
        refused = ask(corral, 3, messages=[{"role": "user", "content": LONG * 9}], stream=stream)
        assert b"exceed" in refused
    assert json.loads(ask(corral, 65))["error"]["code"] == "limit_exceeded"
    assert json.loads(ask(corral, 2))["choices"][1]["index"] == 1  # as before
