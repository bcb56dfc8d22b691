"""A conversation's turns are computed once, whatever happens between them."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from end_to_end.home import Corral

LONG = "the cat sat on the mat and looked at the moon " * 12
Messages = list[dict[str, str]]


def turn(corral_url: str, messages: Messages, question: str) -> tuple[int, int]:
    """Ask one more question; return the tokens that were computed and those that were not."""
    messages.append({"role": "user", "content": question})
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": messages}
    request = urllib.request.Request(
        f"{corral_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer = json.load(response)
    messages.append(answer["choices"][0]["message"])
    return answer["timings"]["prompt_n"], answer["timings"]["cache_n"]


@pytest.fixture
def url(corral: Corral, tiny_model: Path) -> str:
    flags = "flags = { parallel = 4, ctx-size = 16384 }"
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n{flags}\n')
    corral.ok("start")
    return corral.url


def test_a_turn_that_follows_its_answer_at_once_is_not_read_anew(url: str) -> None:
    messages: Messages = []
    first, _ = turn(url, messages, LONG)
    for _ in range(3):
        computed, cached = turn(url, messages, "and then?")
        assert cached >= first
        assert computed < first / 2


def test_others_between_two_turns_do_not_cost_them_their_cache(url: str) -> None:
    talks: list[Messages] = [[], [], []]
    firsts = [turn(url, talk, f"{number} {LONG}")[0] for number, talk in enumerate(talks)]
    for _ in range(3):
        for first, talk in zip(firsts, talks, strict=True):
            assert turn(url, talk, "and then?")[1] >= first
