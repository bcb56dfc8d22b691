"""A conversation's turns are computed once, on every API and with anything in between."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from support.corral_cli import CorralCli

LONG = "the cat sat on the mat and looked at the moon " * 12
Messages = list[dict[str, Any]]
Answer = dict[str, Any]


def chat(answer: Answer) -> tuple[Answer, int, int]:
    timings = answer["timings"]
    return answer["choices"][0]["message"], timings["prompt_n"], timings["cache_n"]


def message(answer: Answer) -> tuple[Answer, int, int]:
    usage = answer["usage"]
    said = {"role": "assistant", "content": answer["content"]}
    return said, usage["input_tokens"], usage["cache_read_input_tokens"]


def response(answer: Answer) -> tuple[Answer, int, int]:
    usage = answer["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return answer["output"][0], usage["input_tokens"] - cached, cached


# For each page: where a conversation stands in a request, what limits its answer, how that is read.
PAGES: Final[dict[str, tuple[str, str, Callable[[Answer], tuple[Answer, int, int]]]]] = {
    "/v1/chat/completions": ("messages", "max_tokens", chat),
    "/v1/messages": ("messages", "max_tokens", message),
    "/v1/responses": ("input", "max_output_tokens", response),
}


def turn(page: str, url: str, messages: Messages, question: str) -> tuple[int, int]:
    """Add a question; return the numbers of computed and of cached prompt tokens."""
    prompt, limit, read = PAGES[page]
    messages.append({"role": "user", "content": question})
    body = {"model": "tiny", limit: 4, "temperature": 0, prompt: messages}
    request = urllib.request.Request(
        f"{url}{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        said, computed, cached = read(json.load(answer))
    messages.append(said)
    return computed, cached


@pytest.fixture
def url(corral: CorralCli, tiny_model: Path) -> str:
    flags = "flags = { parallel = 4, ctx-size = 16384 }"
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n{flags}\n')
    corral.ok("start")
    return corral.url


def test_an_immediate_follow_up_uses_the_cache(url: str) -> None:
    for number, page in enumerate(PAGES):
        messages: Messages = []
        first, _ = turn(page, url, messages, f"{number} {LONG}")
        for _ in range(3):
            computed, cached = turn(page, url, messages, "and then?")
            assert cached >= first, page
            assert computed < first / 2, page


def test_requests_between_two_turns_do_not_evict_their_cache(url: str) -> None:
    conversations: dict[str, Messages] = {page: [] for page in PAGES}
    firsts = {
        page: turn(page, url, conversation, f"{page} {LONG}")[0]
        for page, conversation in conversations.items()
    }
    for _ in range(3):
        for page, conversation in conversations.items():
            assert turn(page, url, conversation, "and then?")[1] >= firsts[page], page


def test_a_shared_prefix_is_computed_once(url: str) -> None:
    for number, page in enumerate(PAGES):
        alike = f"{number} {LONG}"
        first, _ = turn(page, url, [], f"{alike} what is the cat called?")
        for question in ("is it a cat?", "where is the moon?"):
            computed, cached = turn(page, url, [], f"{alike} {question}")
            assert cached > first / 2, page
            assert computed < first / 2, page
